"""Deletes for good what was deleted long enough ago, and replicas whose lease is long over.

An adapter's row leaves a tombstone with its counter (a trigger writes it), so that a version number is never used for
other content. An adapter stays as long as the change log tells of it: whoever resumes a watch must hear of its end.
"""

import asyncio
import logging
import random
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import replica_queries
from registry_service.database import Database
from registry_service.models import DELETED, Adapter, AdapterVersion, Alias, AliasTarget, Change, RequestId
from shared.auth import Caller, audit
from shared.errors import RegistryUnavailable
from shared.references import Reference

log = logging.getLogger(__name__)

CALLER = "purge"  # in the audit log
PURGE_SECONDS = 30.0
TOGETHER = 100  # rows in a transaction: others wait for it
REPLICAS_KEPT = timedelta(minutes=10)  # after their lease, so that one which was away need not tell all again
_LOCK_KEY = 0x70757267  # any number, the same for every registry


class Purged(NamedTuple):
    adapters: int
    versions: int
    replicas: int


class Purger:
    """Purges every `PURGE_SECONDS` or sooner. Of several registries one does it at a time; `keep`: how long deletions
    wait."""

    def __init__(self, database: Database, keep: timedelta) -> None:
        self._database = database
        self._keep = keep
        self.total = Purged(0, 0, 0)  # by this registry

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PURGE_SECONDS * random.uniform(0.5, 1.0))  # not all registries at once
            try:
                while any(purged := await self.purge()):
                    log.info("purged", extra=purged._asdict())
            except RegistryUnavailable:
                pass  # the change log's reader says so
            except Exception:
                log.exception("what was deleted cannot be purged")

    async def purge(self) -> Purged:
        """One transaction; all zero: nothing is left to do, or another registry is at it."""
        purged, names = await self._database.write(self._purge)
        for name in names:
            audit.record(Caller(CALLER, name.namespace, {}), "Purge", name.canonical(), outcome="OK")
        self.total = Purged(*(a + b for a, b in zip(self.total, purged, strict=True)))
        return purged

    async def _purge(self, session: AsyncSession) -> tuple[Purged, list[Reference]]:
        """Also the names of the adapters and versions."""
        if not await _is_mine(session):
            return Purged(0, 0, 0), []
        now = await _now(session)
        await self._set_purge_times(session)
        adapters = await _purge_adapters(session, now)
        versions = await _purge_versions(session, now)
        replicas = await replica_queries.forget_replicas(session, now - REPLICAS_KEPT)
        return Purged(len(adapters), len(versions), replicas), adapters + versions

    async def _set_purge_times(self, session: AsyncSession) -> None:
        """Registries of before there was a purge deleted without one."""
        query = select(Adapter).where(Adapter.delete_time.is_not(None), Adapter.purge_time.is_(None)).limit(TOGETHER)
        for adapter in (await session.scalars(query.with_for_update(skip_locked=True))).all():
            assert adapter.delete_time is not None
            adapter.purge_time = adapter.delete_time + self._keep
        await session.flush()


async def _is_mine(session: AsyncSession) -> bool:
    """SQLite has one writer; on Postgres whoever holds the lock, until commit."""
    if session.get_bind().dialect.name != "postgresql":
        return True
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_LOCK_KEY))))


async def _now(session: AsyncSession) -> datetime:
    """By the clock that the triggers go by, which on SQLite ticks in milliseconds."""
    if session.get_bind().dialect.name == "postgresql":
        return (await session.execute(select(func.now()))).scalar_one()
    return datetime.now(UTC) - timedelta(milliseconds=2)


async def _purge_adapters(session: AsyncSession, now: datetime) -> list[Reference]:
    is_told_of = exists(select(Change.revision).where(Change.adapter_uid == Adapter.uid))
    query = select(Adapter.uid, Adapter.namespace, Adapter.name).where(
        Adapter.delete_time.is_not(None), Adapter.purge_time <= now, ~is_told_of
    )
    found = (await session.execute(query.limit(TOGETHER).with_for_update(skip_locked=True))).all()
    if uids := [row.uid for row in found]:
        await _forget_answers(session, AdapterVersion.adapter_uid.in_(uids))
        for table in (AliasTarget, Alias, AdapterVersion):
            await session.execute(delete(table).where(table.adapter_uid.in_(uids)))
        await session.execute(delete(Adapter).where(Adapter.uid.in_(uids)))
    return [Reference(row.namespace, row.name) for row in found]


async def _purge_versions(session: AsyncSession, now: datetime) -> list[Reference]:
    query = (
        select(AdapterVersion.uid, AdapterVersion.number, Adapter.namespace, Adapter.name)
        .join(Adapter, Adapter.uid == AdapterVersion.adapter_uid)
        .where(AdapterVersion.state == DELETED, AdapterVersion.purge_time <= now)
        .limit(TOGETHER)
        .with_for_update(of=AdapterVersion, skip_locked=True)
    )
    found = (await session.execute(query)).all()
    if uids := [row.uid for row in found]:
        await _forget_answers(session, AdapterVersion.uid.in_(uids))
        await session.execute(delete(AdapterVersion).where(AdapterVersion.uid.in_(uids)))
    return [Reference(row.namespace, row.name, version=row.number) for row in found]


async def _forget_answers(session: AsyncSession, versions: ColumnElement[bool]) -> None:
    """Answers to registrations that name one of the versions."""
    uids = select(AdapterVersion.uid).where(versions)
    await session.execute(delete(RequestId).where(RequestId.version_uid.in_(uids)))
