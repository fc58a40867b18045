"""What lists show of an adapter beside its row: the version that its name alone means, and which replicas serve it."""

from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import replica_queries, repository
from registry_service.models import Replica, Resident
from registry_service.repository import AdapterView
from shared.errors import BaseModelConflict
from shared.references import LATEST

MAX_NOT_READY = 100
_READY = ("HOST", "GPU")
_ANOTHER_BASE_MODEL = (
    "its base model is not the one that is registered under this id, so it serves no adapter; start it with the "
    "registered weights, or under another id (--model-name)"
)


class NotReady(NamedTuple):
    """A replica that has not got a target, and why: a reason of the error table, or a phase."""

    replica: str
    reason: str
    message: str


class Serving(NamedTuple):
    """See the message ServingStatus. `by_version`: how many replicas have each target."""

    ready: int
    target: int
    not_ready: Sequence[NotReady]
    by_version: Mapping[int, int]


class DefaultVersion(NamedTuple):
    """See the message of this name."""

    number: int
    digest: str
    rank: int
    size_bytes: int


class ShownAdapter(NamedTuple):
    """An adapter as GetAdapter and ListAdapters show it."""

    view: AdapterView
    num_versions: int
    default: DefaultVersion | None
    serving: Serving


async def shown(session: AsyncSession, views: Sequence[AdapterView], now: datetime) -> list[ShownAdapter]:
    """`views` with what is known of their replicas at `now`."""
    uids = [view.adapter.uid for view in views]
    counts = await repository.num_live_versions(session, uids)
    targets = {view.adapter.uid: _targets(view) for view in views}
    keys = [(uid, number) for uid, found in targets.items() for number, _ in found]
    versions = await repository.version_facts(session, keys)
    replicas = await replica_queries.live_by_base_model(session, {view.adapter.base_model for view in views}, now)
    residents: dict[tuple[str, str], Resident] = {}
    revisions: dict[str, int] = {}
    others: set[str] = set()
    if replicas:
        others = await replica_queries.of_another_base_model(session, [r.name for of in replicas.values() for r in of])
        residents = await replica_queries.residents(session, {facts.digest for facts in versions.values()}, now)
        revisions = await repository.last_changes(session, uids)
    found = []
    for view in views:
        uid = view.adapter.uid
        numbers = {number: versions[uid, number] for number, _ in targets[uid] if (uid, number) in versions}
        digests = {number: facts.digest for number, facts in numbers.items()}
        live = replicas[view.adapter.base_model]
        serving = _serving(view, digests, live, residents, revisions.get(uid, 0), others)
        found.append(ShownAdapter(view, counts.get(uid, 0), _default(targets[uid], numbers), serving))
    return found


def _targets(view: AdapterView) -> list[tuple[int, float]]:
    """What the default alias means, the highest weight first."""
    if view.adapter.default_alias == LATEST:
        return [(view.latest_version, 1.0)] if view.latest_version else []
    targets = [target for alias in view.aliases if alias.name == view.adapter.default_alias for target in alias.targets]
    return sorted(targets, key=lambda target: (-target[1], -target[0]))


def _default(targets: Sequence[tuple[int, float]], versions: Mapping[int, Any]) -> DefaultVersion | None:
    if not targets or targets[0][0] not in versions:
        return None
    facts = versions[targets[0][0]]
    return DefaultVersion(facts.number, facts.digest, int(facts.lora_config.get("rank", 0)), facts.size_bytes)


def _serving(
    view: AdapterView,
    digests: Mapping[int, str],
    replicas: Sequence[Replica],
    residents: Mapping[tuple[str, str], Resident],
    last_change: int,
    others: Set[str],
) -> Serving:
    """`others`: replicas whose base model is not the one that is registered."""
    by_version: dict[int, int] = dict.fromkeys(digests, 0)
    not_ready: list[NotReady] = []
    for replica in replicas:
        held = {number: residents.get((replica.name, digest)) for number, digest in digests.items()}
        missing = [number for number, resident in held.items() if resident is None or resident.level not in _READY]
        for number in held.keys() - set(missing):
            by_version[number] += 1
        if missing or not digests:
            not_ready.append(
                NotReady(replica.name, BaseModelConflict.reason, _ANOTHER_BASE_MODEL)
                if replica.name in others
                else _why(view, replica, missing, held, last_change)
            )
    return Serving(len(replicas) - len(not_ready), len(replicas), not_ready[:MAX_NOT_READY], by_version)


def _why(
    view: AdapterView,
    replica: Replica,
    missing: Sequence[int],
    held: Mapping[int, Resident | None],
    last_change: int,
) -> NotReady:
    if not missing:
        return NotReady(replica.name, "NO_VERSION", "the adapter's default alias names no version")
    resident = held[missing[0]]
    version = f"version {missing[0]}"
    if resident is not None and resident.level == "FAILED":
        return NotReady(replica.name, resident.reason, f"{version} is wanted and not there")
    if replica.observed_revision < last_change:
        return NotReady(replica.name, "NOT_OBSERVED", "the replica has not heard of the last change")
    if resident is not None:
        return NotReady(replica.name, "ON_DISK", f"{version} is on the replica's disk")
    if view.adapter.residency == "ON_DEMAND":
        return NotReady(replica.name, "ON_DEMAND", f"{version} is loaded on its first request")
    return NotReady(replica.name, "PENDING", f"{version} is not there yet")
