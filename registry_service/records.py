"""Queries for whole adapters and for the log of their changes: what ResolveAdapter and WatchAdapters answer from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, func, literal_column, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from registry_service.database import Database
from registry_service.models import DELETED, Adapter, AdapterVersion, Alias, AliasTarget, Change, RegistryState
from registry_service.repository import AdapterView, AliasView, previous_targets

Entity = TypeVar("Entity", Adapter, AdapterVersion)

_ADAPTER = tuple(Adapter.__table__.columns)
_VERSION = tuple(AdapterVersion.__table__.columns)
_ADAPTER_KEYS = tuple(column.key for column in _ADAPTER)
_VERSION_KEYS = tuple(column.key for column in _VERSION)


@dataclass(frozen=True, eq=False)
class AdapterRecord:
    """An adapter as it was at `revision`; `versions` are the live ones that its aliases or `latest` name, by number.

    `others`: versions asked for by number or digest meanwhile, None where there is no such live one.
    """

    adapter: Adapter
    aliases: tuple[AliasView, ...]
    versions: Mapping[int, AdapterVersion]
    revision: int
    others: dict[int | str, AdapterVersion | None] = field(default_factory=dict)

    @property
    def latest_version(self) -> int:
        """The highest live version, 0 if there is none."""
        return max(self.versions, default=0)

    @property
    def view(self) -> AdapterView:
        """What GetAdapter shows."""
        return AdapterView(self.adapter, self.aliases, self.latest_version)


@dataclass(frozen=True, eq=False)
class LoggedChange:
    """One entry of the log, and its adapter as it was when the entry was read; `deleted_version`: see `Change`."""

    revision: int
    record: AdapterRecord
    deleted_version: int | None = None


class LogState(NamedTuple):
    """How far the log goes: `revision` is the last, `compacted` the last one forgotten, `epoch` the database's life."""

    epoch: str
    revision: int
    compacted: int


class LogPage(NamedTuple):
    """Changes in order, complete up to the revision `through`."""

    state: LogState
    changes: Sequence[LoggedChange]
    through: int


# ---- whole adapters


async def record(database: Database, namespace: str, name: str) -> tuple[AdapterRecord | None, int]:
    """One adapter, deleted or not, and the revision at which there is this one, or none."""
    revision, found = _records(await database.rows(_BY_NAME, {"of_namespace": namespace, "of_name": name}))
    return (found[0] if found else None), revision


async def live_version(database: Database, uid: str, wanted: int | str) -> AdapterVersion | None:
    """The adapter's live version of this number or digest."""
    query = _BY_DIGEST if isinstance(wanted, str) else _BY_NUMBER
    rows = await database.rows(query, {"of_adapter": uid, "wanted": wanted})
    return _entity(AdapterVersion, _VERSION_KEYS, rows[0]) if rows else None


async def snapshot_page(
    session: AsyncSession,
    namespaces: frozenset[str] | None,
    base_model: str,
    is_wanted_only: bool,
    after: tuple[str, str],
    limit: int,
) -> list[AdapterRecord]:
    """Adapters that are not deleted by (namespace, name), those after `after`; `namespaces` None and `base_model` (an
    id) "" are all. `is_wanted_only`: those that replicas shall hold."""
    row = aliased(Adapter)
    page = select(row.uid).where(row.delete_time.is_(None), tuple_(row.namespace, row.name) > tuple_(*after))
    if namespaces is not None:
        page = page.where(row.namespace.in_(namespaces))
    if base_model:
        page = page.where(row.base_model == base_model)
    if is_wanted_only:
        page = page.where(row.residency != literal_column("'ON_DEMAND'"))  # the condition of an index
    page = page.order_by(row.namespace, row.name).limit(limit)
    _, found = _records((await session.execute(_whole_adapters(Adapter.uid.in_(page)))).all())
    whole = await _with_previous_targets(session, found)
    return sorted(whole, key=lambda record: (record.adapter.namespace, record.adapter.name))


def _whole_adapters(wanted: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    """The adapters that fulfil `wanted`: a row for every alias of a version, and for one without. See `_Row`."""
    other = aliased(AdapterVersion)
    latest = select(func.max(other.number)).where(other.adapter_uid == Adapter.uid, other.state != DELETED)
    return (
        select(RegistryState.revision, *_ADAPTER, *_VERSION, AliasTarget.weight, Alias.name, Alias.update_time)
        .select_from(RegistryState)
        .outerjoin(Adapter, wanted)
        .outerjoin(AdapterVersion, and_(AdapterVersion.adapter_uid == Adapter.uid, AdapterVersion.state != DELETED))
        .outerjoin(
            AliasTarget,
            and_(AliasTarget.adapter_uid == Adapter.uid, AliasTarget.version == AdapterVersion.number),
        )
        .outerjoin(Alias, and_(Alias.adapter_uid == AliasTarget.adapter_uid, Alias.name == AliasTarget.alias))
        .where(
            or_(
                AdapterVersion.uid.is_(None),
                Alias.name.is_not(None),
                AdapterVersion.number == latest.correlate(Adapter).scalar_subquery(),
            )
        )
        .order_by(Alias.name, AdapterVersion.number)
    )


# Built once: to build it takes three times as long as to run it.
_BY_NAME = _whole_adapters(and_(Adapter.namespace == bindparam("of_namespace"), Adapter.name == bindparam("of_name")))
_BY_UID = _whole_adapters(Adapter.uid.in_(bindparam("uids", expanding=True)))


_LIVE_VERSION = select(*_VERSION).where(
    AdapterVersion.adapter_uid == bindparam("of_adapter"), AdapterVersion.state != DELETED
)
_BY_NUMBER = _LIVE_VERSION.where(AdapterVersion.number == bindparam("wanted"))
_BY_DIGEST = _LIVE_VERSION.where(AdapterVersion.digest == bindparam("wanted"))


class _Row(NamedTuple):
    """A row of `_whole_adapters`. Values of `adapter` and `version` are all None where there is none."""

    revision: int
    adapter: Sequence[Any]
    version: Sequence[Any]
    weight: float
    alias: str | None
    alias_time: datetime


def _records(rows: Sequence[Sequence[Any]]) -> tuple[int, list[AdapterRecord]]:
    """The adapters that a query of `_whole_adapters` has found, and the revision at which they are so."""
    by_adapter: dict[str, list[_Row]] = {}
    for row in rows:
        adapter, version = row[1 : 1 + len(_ADAPTER)], row[1 + len(_ADAPTER) : -3]
        if (uid := adapter[0]) is not None:
            by_adapter.setdefault(uid, []).append(_Row(row[0], adapter, version, *row[-3:]))
    return rows[0][0], [_record(found) for found in by_adapter.values()]


def _record(rows: Sequence[_Row]) -> AdapterRecord:
    versions: dict[str, AdapterVersion] = {}
    targets: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        uid = row.version[0]
        if uid is not None and uid not in versions:
            versions[uid] = _entity(AdapterVersion, _VERSION_KEYS, row.version)
        if row.alias is not None:
            targets.setdefault(row.alias, []).append((versions[uid].number, row.weight))
    times = {row.alias: row.alias_time for row in rows}
    aliases = tuple(AliasView(name, tuple(found), times[name]) for name, found in targets.items())
    by_number = {version.number: version for version in versions.values()}
    return AdapterRecord(_entity(Adapter, _ADAPTER_KEYS, rows[0].adapter), aliases, by_number, rows[0].revision)


def _entity(kind: type[Entity], keys: Sequence[str], values: Sequence[Any]) -> Entity:
    """An object of no session: those that a session makes and keeps track of take longer."""
    return kind(**dict(zip(keys, values, strict=True)))


# ---- the log


async def log_state(session: AsyncSession) -> LogState:
    """How far the log goes."""
    columns = (RegistryState.epoch, RegistryState.revision, RegistryState.compacted_revision)
    return LogState(*(await session.execute(select(*columns))).one())


async def changes_after(session: AsyncSession, revision: int, limit: int) -> LogPage:
    """At most `limit` changes after `revision`."""
    state = await log_state(session)
    if state.revision <= revision:
        return LogPage(state, (), state.revision)
    query = select(Change.revision, Change.adapter_uid, Change.deleted_version).where(Change.revision > revision)
    rows = (await session.execute(query.order_by(Change.revision).limit(limit))).all()
    found = await _by_uid(session, {row.adapter_uid for row in rows}) if rows else {}
    changes = [LoggedChange(row.revision, found[row.adapter_uid], row.deleted_version) for row in rows]
    return LogPage(state, changes, changes[-1].revision if len(changes) == limit else state.revision)


async def _by_uid(session: AsyncSession, uids: Iterable[str]) -> dict[str, AdapterRecord]:
    _, found = _records((await session.execute(_BY_UID, {"uids": list(uids)})).all())
    return {record.adapter.uid: record for record in await _with_previous_targets(session, found)}


async def _with_previous_targets(session: AsyncSession, found: Sequence[AdapterRecord]) -> list[AdapterRecord]:
    """For watches. No resolution needs them."""
    previous = await previous_targets(session, [record.adapter.uid for record in found if record.aliases])
    return [
        replace(
            record,
            aliases=tuple(
                alias._replace(previous=previous.get((record.adapter.uid, alias.name), ())) for alias in record.aliases
            ),
        )
        for record in found
    ]


async def compact(session: AsyncSession, before: datetime, keep: int) -> int:
    """Forgets the changes from before a time, and all but the newest `keep`. How many that were."""
    newer = select(Change.revision).order_by(Change.revision.desc()).offset(keep).limit(1)
    by_size = await session.scalar(newer) or 0
    by_age = await session.scalar(select(func.max(Change.revision)).where(Change.create_time < before)) or 0
    horizon = max(by_size, by_age)
    if not horizon:
        return 0
    deleted = await session.execute(delete(Change).where(Change.revision <= horizon))
    raised = update(RegistryState).where(RegistryState.compacted_revision < horizon)
    await session.execute(raised.values(compacted_revision=horizon))
    return int(deleted.rowcount)  # type: ignore[attr-defined]  # of a CursorResult, as every DELETE has
