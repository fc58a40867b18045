"""Every query. Functions take the session of the transaction they belong to and hold no rules."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from registry_service.models import (
    DELETED,
    Adapter,
    AdapterVersion,
    Alias,
    AliasTarget,
    BaseModel,
    Change,
    PreviousAliasTarget,
    RegistryState,
    RequestId,
    Tombstone,
)
from registry_service.ordering import Order

CHANGES_CHANNEL = "loraplex_changes"  # of Postgres' NOTIFY

T = TypeVar("T")

_TOGETHER = 500  # values in one statement


class Target(NamedTuple):
    """A version that an alias names, and its share."""

    version: AdapterVersion
    weight: float


class AliasView(NamedTuple):
    """An alias and its targets as (version number, weight); `previous`: those before its last change, if known."""

    name: str
    targets: tuple[tuple[int, float], ...]
    update_time: datetime
    previous: tuple[tuple[int, float], ...] = ()


class AdapterView(NamedTuple):
    """An adapter with what is shown along with it."""

    adapter: Adapter
    aliases: tuple[AliasView, ...] = ()
    latest_version: int = 0


class RequestKey(NamedTuple):
    """What a request id is unique within."""

    caller: str
    namespace: str
    request_id: str


class VersionFacts(NamedTuple):
    """What lists show of a version."""

    number: int
    digest: str
    size_bytes: int
    lora_config: dict[str, Any]


class ListQuery(NamedTuple):
    """What a list shows: where `condition` holds, those after the key `after` in `order`, at most `limit`."""

    condition: ColumnElement[bool] | None
    order: Order
    after: Sequence[Any] | None
    limit: int
    show_deleted: bool


def parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """`values` in parts that one statement can have."""
    for first in range(0, len(values), _TOGETHER):
        yield values[first : first + _TOGETHER]


# ---- revision


async def revision(session: AsyncSession) -> int:
    """Number of committed changes."""
    return (await session.execute(select(RegistryState.revision))).scalar_one()


async def next_revision(session: AsyncSession) -> int:
    """Counts one more change, and on Postgres has the commit notify those who listen.

    The row stays locked until commit, so the order of revisions is the order of commits. Everybody else who writes
    waits for it meanwhile: call this last.
    """
    await session.flush()
    counted = update(RegistryState).values(revision=RegistryState.revision + 1).returning(RegistryState.revision)
    if session.get_bind().dialect.name == "postgresql":
        counted = counted.returning(func.pg_notify(CHANGES_CHANNEL, ""))
    return int((await session.execute(counted)).scalar_one())


async def record_change(
    session: AsyncSession, adapter: Adapter, kind: str, now: datetime, deleted_version: int | None = None
) -> int:
    """Writes a change of `adapter` to the log, as the last thing in its transaction. Returns its revision."""
    number = await next_revision(session)
    row = Change(revision=number, adapter_uid=adapter.uid, kind=kind, create_time=now, deleted_version=deleted_version)
    session.add(row)
    await session.flush()
    return number


# ---- base models


async def base_model(session: AsyncSession, model_id: str, *, lock: bool = False) -> BaseModel | None:
    """One base model; with `lock` nobody else can change it until commit."""
    return await session.get(BaseModel, model_id, with_for_update=True if lock else None)


async def base_models(session: AsyncSession, after: str, limit: int) -> Sequence[BaseModel]:
    """Base models by id, those after `after`."""
    query = select(BaseModel).where(BaseModel.id > after).order_by(BaseModel.id).limit(limit)
    return (await session.scalars(query)).all()


# ---- adapters


async def adapter(session: AsyncSession, namespace: str, name: str, *, lock: bool = False) -> Adapter | None:
    """One adapter, deleted or not; with `lock` nobody else can change it until commit."""
    query = select(Adapter).where(Adapter.namespace == namespace, Adapter.name == name)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def adapters(session: AsyncSession, namespaces: frozenset[str] | None, listed: ListQuery) -> Sequence[Adapter]:
    """Adapters of the namespaces; None is all."""
    query = select(Adapter)
    if namespaces is not None:
        query = query.where(Adapter.namespace.in_(namespaces))
    if not listed.show_deleted:
        query = query.where(Adapter.delete_time.is_(None))
    return (await session.scalars(_listed(query, listed))).all()


def _listed(query: Any, listed: ListQuery) -> Any:
    if listed.condition is not None:
        query = query.where(listed.condition)
    if listed.after is not None:
        query = query.where(listed.order.after(listed.after))
    return query.order_by(*listed.order.columns).limit(listed.limit)


async def first_version(session: AsyncSession, namespace: str, name: str) -> int:
    """The number of the next version of a name that there is no adapter of: 1, or what follows those purged."""
    tombstone = await session.get(Tombstone, (namespace, name))
    return 1 if tombstone is None else tombstone.next_version


async def last_changes(session: AsyncSession, uids: Sequence[str]) -> dict[str, int]:
    """The revision of each adapter's last change that the log remembers."""
    query = select(Change.adapter_uid, func.max(Change.revision)).where(Change.adapter_uid.in_(uids))
    return {row[0]: row[1] for row in await session.execute(query.group_by(Change.adapter_uid))}


async def views(session: AsyncSession, rows: Sequence[Adapter]) -> list[AdapterView]:
    """`rows` with their aliases and latest versions."""
    uids = [row.uid for row in rows]
    latest = await _latest_versions(session, uids)
    aliases = await _aliases(session, uids)
    return [AdapterView(row, tuple(aliases.get(row.uid, ())), latest.get(row.uid, 0)) for row in rows]


async def _latest_versions(session: AsyncSession, uids: Sequence[str]) -> dict[str, int]:
    query = (
        select(AdapterVersion.adapter_uid, func.max(AdapterVersion.number))
        .where(AdapterVersion.adapter_uid.in_(uids), AdapterVersion.state != DELETED)
        .group_by(AdapterVersion.adapter_uid)
    )
    return {row[0]: row[1] for row in await session.execute(query)}


async def _aliases(session: AsyncSession, uids: Sequence[str]) -> dict[str, list[AliasView]]:
    targets = await _targets(session, AliasTarget, uids)
    previous = await previous_targets(session, uids)
    found: dict[str, list[AliasView]] = {}
    for alias in await session.scalars(select(Alias).where(Alias.adapter_uid.in_(uids)).order_by(Alias.name)):
        key = (alias.adapter_uid, alias.name)
        view = AliasView(alias.name, targets.get(key, ()), alias.update_time, previous.get(key, ()))
        found.setdefault(alias.adapter_uid, []).append(view)
    return found


async def previous_targets(
    session: AsyncSession, uids: Sequence[str]
) -> dict[tuple[str, str], tuple[tuple[int, float], ...]]:
    """What aliases meant before their last change: by (adapter uid, alias), in order of the versions."""
    return await _targets(session, PreviousAliasTarget, uids) if uids else {}


async def _targets(
    session: AsyncSession, table: type[AliasTarget] | type[PreviousAliasTarget], uids: Sequence[str]
) -> dict[tuple[str, str], tuple[tuple[int, float], ...]]:
    query = select(table.adapter_uid, table.alias, table.version, table.weight).where(table.adapter_uid.in_(uids))
    found: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {}
    for uid, alias, version, weight in await session.execute(query.order_by(table.alias, table.version)):
        found[uid, alias] = (*found.get((uid, alias), ()), (version, weight))
    return found


# ---- versions


async def version(session: AsyncSession, uid: str, number: int) -> AdapterVersion | None:
    """One version of an adapter, deleted or not."""
    query = select(AdapterVersion).where(AdapterVersion.adapter_uid == uid, AdapterVersion.number == number)
    return (await session.scalars(query)).one_or_none()


async def live_version_number(session: AsyncSession, uid: str, number: int) -> AdapterVersion | None:
    """The adapter's live version of this number."""
    found = await version(session, uid, number)
    return None if found is None or found.state == DELETED else found


async def version_by_uid(session: AsyncSession, uid: str) -> AdapterVersion:
    """A version that is known to exist."""
    return await session.get_one(AdapterVersion, uid)


async def live_version(session: AsyncSession, uid: str, digest: str) -> AdapterVersion | None:
    """The adapter's live version with this content."""
    query = select(AdapterVersion).where(
        AdapterVersion.adapter_uid == uid, AdapterVersion.digest == digest, AdapterVersion.state != DELETED
    )
    return (await session.scalars(query)).one_or_none()


async def latest_version(session: AsyncSession, uid: str) -> AdapterVersion | None:
    """The adapter's highest live version."""
    query = select(AdapterVersion).where(AdapterVersion.adapter_uid == uid, AdapterVersion.state != DELETED)
    return (await session.scalars(query.order_by(AdapterVersion.number.desc()).limit(1))).one_or_none()


async def versions(session: AsyncSession, uid: str, listed: ListQuery) -> Sequence[AdapterVersion]:
    """An adapter's versions."""
    query = select(AdapterVersion).where(AdapterVersion.adapter_uid == uid)
    if not listed.show_deleted:
        query = query.where(AdapterVersion.state != DELETED)
    return (await session.scalars(_listed(query, listed))).all()


async def num_live_versions(session: AsyncSession, uids: Sequence[str]) -> dict[str, int]:
    """How many live versions each adapter has."""
    query = select(AdapterVersion.adapter_uid, func.count()).where(
        AdapterVersion.adapter_uid.in_(uids), AdapterVersion.state != DELETED
    )
    return {row[0]: row[1] for row in await session.execute(query.group_by(AdapterVersion.adapter_uid))}


async def version_facts(session: AsyncSession, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], VersionFacts]:
    """Facts of the versions (adapter uid, number)."""
    found: dict[tuple[str, int], VersionFacts] = {}
    row = AdapterVersion
    for part in parts(keys):
        uids, numbers = zip(*part, strict=True)
        query = select(row.adapter_uid, row.number, row.digest, row.size_bytes, row.lora_config).where(
            row.adapter_uid.in_(uids), row.number.in_(set(numbers)),  # for pairs alone SQLite reads the whole table
            tuple_(row.adapter_uid, row.number).in_(part),
        )  # fmt: skip
        for uid, *facts in await session.execute(query):
            found[uid, facts[0]] = VersionFacts(*facts)
    return found


# ---- aliases


async def alias_targets(session: AsyncSession, uid: str, alias: str) -> list[Target]:
    """What an alias names, highest weight first; empty if there is no such alias."""
    query = (
        select(AdapterVersion, AliasTarget.weight)
        .join(
            AliasTarget,
            (AliasTarget.adapter_uid == AdapterVersion.adapter_uid) & (AliasTarget.version == AdapterVersion.number),
        )
        .where(AliasTarget.adapter_uid == uid, AliasTarget.alias == alias)
        .order_by(AliasTarget.weight.desc(), AliasTarget.version.desc())
    )
    return [Target(row, weight) for row, weight in await session.execute(query)]


async def set_alias(
    session: AsyncSession, uid: str, alias: str, targets: Sequence[tuple[int, float]], now: datetime
) -> None:
    """Creates the alias or replaces its targets. The adapter's row must be locked."""
    await session.merge(Alias(adapter_uid=uid, name=alias, update_time=now))
    await session.flush()  # now a trigger keeps the targets that there are as the previous ones
    await session.execute(delete(AliasTarget).where(AliasTarget.adapter_uid == uid, AliasTarget.alias == alias))
    await session.flush()
    session.add_all(AliasTarget(adapter_uid=uid, alias=alias, version=number, weight=w) for number, w in targets)
    await session.flush()


async def aliases_of(session: AsyncSession, uid: str, number: int) -> Sequence[str]:
    """The aliases that name a version."""
    query = select(AliasTarget.alias).where(AliasTarget.adapter_uid == uid, AliasTarget.version == number)
    return (await session.scalars(query.order_by(AliasTarget.alias))).all()


async def delete_alias(session: AsyncSession, uid: str, alias: str) -> bool:
    """Whether there was such an alias. The adapter's row must be locked."""
    row = await session.get(Alias, (uid, alias))
    if row is None:
        return False
    await session.execute(delete(AliasTarget).where(AliasTarget.adapter_uid == uid, AliasTarget.alias == alias))
    await session.delete(row)
    await session.flush()
    return True


# ---- request ids


async def stored_answer(session: AsyncSession, key: RequestKey, now: datetime) -> RequestId | None:
    """The answer given to a request id that has not expired."""
    found = await session.get(RequestId, tuple(key))
    return found if found is not None and found.expire_time > now else None


async def forget_answers(session: AsyncSession, now: datetime) -> None:
    """Deletes the answers that have expired."""
    await session.execute(delete(RequestId).where(RequestId.expire_time <= now))
