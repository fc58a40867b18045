"""Which of an alias's weighted targets a request gets: the same on every replica, without talking to anyone."""

import hashlib
import math
from collections.abc import Sequence

from shared.errors import InvalidArgument


def choose(uid: str, alias: str, key: str, targets: Sequence[tuple[int, float]]) -> int:
    """The version that `key` gets under `alias` of the adapter `uid`, out of `targets` [(version, weight)].

    Semantics: the target with the greatest -weight / ln(h), h in (0, 1) hashed from (uid, alias, key, version)
    (weighted rendezvous hashing: Schindelhauer and Schomaker, 2005). Over many keys each version gets its share of
    the weights, and when one weight changes only keys that move to or from that version change. The order of
    `targets` does not matter; weight 0 is never chosen.

    Raises:
        InvalidArgument: a weight is negative or not finite, or none is above zero.
    """
    if any(weight < 0 or not math.isfinite(weight) for _, weight in targets):
        raise InvalidArgument.of("targets.weight", "must be finite and not negative")
    live = [(version, weight) for version, weight in targets if weight > 0]
    if not live:
        raise InvalidArgument.of("targets", "no target has a weight above zero")
    return max((-weight / math.log(_unit_hash(uid, alias, key, version)), version) for version, weight in live)[1]


def _unit_hash(uid: str, alias: str, key: str, version: int) -> float:
    """A uniform number in (0, 1). Parts are length-prefixed so that no two lists of parts collide."""
    parts = (part.encode("utf-8", "surrogatepass") for part in (uid, alias, key, str(version)))
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
    return (int.from_bytes(digest[:8], "big") // 4096 + 0.5) / (1 << 52)
