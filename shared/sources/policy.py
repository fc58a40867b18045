"""Who may read what: allow-lists of URIs by namespace, and which credential goes with which source."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from shared.errors import CredentialNotAllowed, SourceForbidden
from shared.sources import advice
from shared.sources.credentials import EVERY_NAMESPACE, Credential


class Patience(NamedTuple):
    """How long remote sources are waited for, in seconds.

    `connect`, `read`: without an answer, without a byte. `answer`: until an answer has begun, or a list of files is
    whole. `attempts` that bring nothing, with `first_delay` after the first and twice as long after each further one,
    up to `longest_delay`; a server that asks for more is given up.
    `stall`: without a byte, over all attempts, of which no further one is made then.
    `least_rate`: bytes a second, over `pace` seconds, below which a source is given up.
    """

    connect: float = 5.0
    read: float = 10.0
    answer: float = 60.0
    attempts: int = 5
    first_delay: float = 0.2
    longest_delay: float = 5.0
    stall: float = 20.0
    least_rate: float = 4096.0
    pace: float = 30.0


_USUAL = Patience()


class Access(NamedTuple):
    """What one source may use.

    `roots`: the folders that `file://ROOT/…` may name. `credential`: the one that the source names, if any.
    `endpoints`: servers that may be private or speak plain HTTP. `is_allowed`: whether the source's namespace may read
    another URI, such as the target of a redirect. `stopping`: set when nobody waits for the bytes any more.
    """

    roots: Mapping[str, Path]
    credential: Credential | None
    endpoints: tuple[str, ...]
    is_allowed: Callable[[str], bool]
    stopping: threading.Event
    patience: Patience = _USUAL


@dataclass(frozen=True)
class SourcePolicy:
    """What a service's configuration says about sources.

    `allowed`: `[NAMESPACE=]PREFIX` entries; without any, every namespace may read every URI. `endpoints`: see `Access`.
    """

    roots: Mapping[str, Path]
    credentials: Mapping[str, Credential] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    patience: Patience = _USUAL

    def is_allowed(self, uri: str, namespace: str) -> bool:
        """Whether `namespace` may read `uri`."""
        rules = [split_rule(rule) for rule in self.allowed]
        return not rules or any(who in (EVERY_NAMESPACE, namespace) and is_below(uri, prefix) for who, prefix in rules)

    def check(self, uri: str, credential_ref: str, namespace: str) -> Credential | None:
        """The credential to open `uri` with, if `namespace` may do that.

        Raises:
            SourceForbidden: the namespace may not read the URI.
            CredentialNotAllowed: it may not use the credential for it. Nothing tells whether there is such a one.
        """
        if not self.is_allowed(uri, namespace):
            problem = f"namespace {namespace} may not read {uri}; {advice.ALLOW_SOURCE}"
            raise SourceForbidden(problem, metadata={"uri": uri})
        if not credential_ref:
            return None
        found = self.credentials.get(credential_ref)
        scheme = uri.partition("://")[0]
        if found is not None and found.serves(scheme, namespace) and any(is_below(uri, p) for p in found.prefixes):
            return found
        raise CredentialNotAllowed(
            f"namespace {namespace} has no credential {credential_ref!r:.100} for {uri}",
            metadata={"credential_ref": credential_ref[:100], "uri": uri},
        )

    def access(self, credential: Credential | None, namespace: str, stopping: threading.Event) -> Access:
        """What a source of this namespace may use."""
        own = (credential.endpoint,) if credential is not None and credential.endpoint else ()
        endpoints = (*self.endpoints, *own)

        def is_allowed(uri: str) -> bool:
            return self.is_allowed(uri, namespace)

        return Access(self.roots, credential, endpoints, is_allowed, stopping, self.patience)


def split_rule(rule: str) -> tuple[str, str]:
    """Namespace and prefix of `[NAMESPACE=]PREFIX`."""
    namespace, equals, prefix = rule.partition("=")
    return (namespace, prefix) if equals and "://" not in namespace else (EVERY_NAMESPACE, rule)


def is_below(uri: str, prefix: str) -> bool:
    """Whether `uri` is what `prefix` names or lies below it, as the characters are written.

    A path that could climb out by a segment of dots, written in whatever way, lies below nothing.
    """
    if any(unquote(segment) in (".", "..") for segment in unquote(uri).replace("\\", "/").split("/")):
        return False
    whole = prefix.rstrip("/")
    if "/" not in whole:  # `s3://`: all of the scheme
        return uri.startswith(f"{whole}//")
    # A revision belongs to its repository: hf://org/repo covers hf://org/repo@main. Elsewhere `@` could name a host.
    separators = "/@" if uri.startswith("hf://") else "/"
    return uri == whole or (uri.startswith(whole) and uri[len(whole)] in separators)
