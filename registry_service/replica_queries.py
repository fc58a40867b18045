"""Queries for replicas and what they hold. As `repository`: of a given transaction, and without rules."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from registry_service.models import Replica, Resident
from registry_service.repository import parts
from shared.errors import BaseModelConflict


async def replica(session: AsyncSession, name: str, *, lock: bool = False) -> Replica | None:
    """One replica, its lease ended or not; with `lock` nobody else can change it until commit."""
    return await session.get(Replica, name, with_for_update=True if lock else None)


async def replicas(session: AsyncSession, base_model: str, after: str, limit: int, now: datetime) -> Sequence[Replica]:
    """Replicas with a lease by name, those after `after`; `base_model` (an id) "" is all."""
    query = select(Replica).where(Replica.name > after, Replica.lease_expire_time > now)
    if base_model:
        query = query.where(Replica.base_model == base_model)
    return (await session.scalars(query.order_by(Replica.name).limit(limit))).all()


async def live_by_base_model(
    session: AsyncSession, base_models: Collection[str], now: datetime
) -> Mapping[str, Sequence[Replica]]:
    """Replicas with a lease, by name, of each of the base models."""
    query = select(Replica).where(Replica.base_model.in_(base_models), Replica.lease_expire_time > now)
    found: dict[str, list[Replica]] = defaultdict(list)
    for row in await session.scalars(query.order_by(Replica.name)):
        found[row.base_model].append(row)
    return found


async def residents(session: AsyncSession, digests: Iterable[str], now: datetime) -> dict[tuple[str, str], Resident]:
    """What replicas with a lease hold of `digests`, by (replica, digest)."""
    found: dict[tuple[str, str], Resident] = {}
    for part in parts(sorted(digests)):
        query = select(Resident).join(Replica, Replica.name == Resident.replica)
        query = query.where(Resident.digest.in_(part), Replica.lease_expire_time > now)
        found.update(((row.replica, row.digest), row) for row in await session.scalars(query))
    return found


async def of_another_base_model(session: AsyncSession, names: Collection[str]) -> set[str]:
    """Those of the replicas that report a BASE_MODEL_CONFLICT. They do of all that they name, so one entry tells."""
    first = select(Resident.reason).where(Resident.replica == Replica.name).order_by(Resident.digest).limit(1)
    found: set[str] = set()
    for part in parts(sorted(names)):
        query = select(Replica.name).where(Replica.name.in_(part))
        found.update(await session.scalars(query.where(first.scalar_subquery() == BaseModelConflict.reason)))
    return found


async def residents_of(session: AsyncSession, name: str) -> dict[str, Resident]:
    """Everything that a replica holds, by digest."""
    query = select(Resident).where(Resident.replica == name).order_by(Resident.digest)
    return {row.digest: row for row in await session.scalars(query)}


async def some_residents_of(session: AsyncSession, name: str, digests: Iterable[str]) -> dict[str, Resident]:
    """What a replica holds of `digests`."""
    found: dict[str, Resident] = {}
    for part in parts(sorted(digests)):
        query = select(Resident).where(Resident.replica == name, Resident.digest.in_(part))
        found.update((row.digest, row) for row in await session.scalars(query))
    return found


async def num_residents(session: AsyncSession, names: Sequence[str]) -> dict[str, int]:
    """How many entries each replica has."""
    query = select(Resident.replica, func.count()).where(Resident.replica.in_(names)).group_by(Resident.replica)
    return {row[0]: row[1] for row in await session.execute(query)}


async def forget_residents(session: AsyncSession, name: str, digests: Iterable[str]) -> None:
    """The replica holds these no longer."""
    for part in parts(sorted(digests)):
        await session.execute(delete(Resident).where(Resident.replica == name, Resident.digest.in_(part)))


async def forget_replicas(session: AsyncSession, before: datetime) -> int:
    """Deletes replicas whose lease ended before a time. How many that were."""
    deleted = await session.execute(delete(Replica).where(Replica.lease_expire_time < before))
    return int(deleted.rowcount)  # type: ignore[attr-defined]  # of a CursorResult, as every DELETE has
