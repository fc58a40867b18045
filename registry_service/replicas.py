"""Replicas by what they report: each holds a lease, and what it last said it holds is true until that ends.

Reports are frequent and no change of the registry: they move no revision and no etag.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import replica_queries as queries
from registry_service import repository
from registry_service.database import Database
from registry_service.models import Replica, Resident
from registry_service.pages import Page
from shared.errors import BaseModelUnknown

MAX_SHOWN_RESIDENTS = 20_000  # of all replicas on one page, unless one alone has more


class ResidentState(NamedTuple):
    """What a replica holds of one content. `level`: DISK, HOST, GPU, or FAILED for `reason`."""

    digest: str
    level: str
    pinned: bool
    reason: str


class Report(NamedTuple):
    """A checked report. `is_full`: `residents` is all there is; else what changed, with `removed` gone."""

    replica: str
    base_model: str
    observed_revision: int
    is_full: bool
    residents: Mapping[str, ResidentState]
    removed: frozenset[str]


class ShownReplica(NamedTuple):
    replica: Replica
    residents: Sequence[Resident]


class Replicas:
    """The replicas of one registry. `lease` is how long a report stands."""

    def __init__(self, database: Database, lease: timedelta) -> None:
        self._database = database
        self.lease = lease

    async def report(self, report: Report) -> bool:
        """Takes a report. False if it tells only changes, and what was before is not known: nothing is taken then.

        Raises:
            BaseModelUnknown: the replica's base model is not registered (yet).
        """

        async def work(session: AsyncSession) -> bool:
            if await repository.base_model(session, report.base_model) is None:
                message = f"base model {report.base_model} is not registered"
                raise BaseModelUnknown(message, metadata={"base_model": report.base_model})
            replica = await queries.replica(session, report.replica, lock=True)
            if not report.is_full and (replica is None or replica.base_model != report.base_model):
                return False
            replica = replica or Replica(name=report.replica)
            replica.base_model = report.base_model
            replica.observed_revision = report.observed_revision
            replica.lease_expire_time = datetime.now(UTC) + self.lease
            session.add(replica)
            await session.flush()
            await _store(session, report)
            return True

        return await self._database.write(work)

    async def list(self, base_model: str, page: Page) -> tuple[list[ShownReplica], bool]:
        """Replicas with a lease by name, and whether there are more; `base_model` (an id) "" is all."""
        after = str(page.after[0]) if page.after else ""

        async def work(session: AsyncSession) -> tuple[list[ShownReplica], bool]:
            found = await queries.replicas(session, base_model, after, page.size + 1, datetime.now(UTC))
            counts = await queries.num_residents(session, [row.name for row in found])
            shown: list[ShownReplica] = []
            total = 0
            for row in found[: page.size]:
                total += counts.get(row.name, 0)
                if shown and total > MAX_SHOWN_RESIDENTS:
                    break
                residents = await queries.residents_of(session, row.name) if row.name in counts else {}
                shown.append(ShownReplica(row, list(residents.values())))
            return shown, len(found) > len(shown)

        return await self._database.read(work)


async def _store(session: AsyncSession, report: Report) -> None:
    """Writes what is other than before."""
    name = report.replica
    if report.is_full:
        known = await queries.residents_of(session, name)
        gone = frozenset(known.keys() - report.residents.keys())
    else:
        known = await queries.some_residents_of(session, name, report.residents)
        gone = report.removed
    await queries.forget_residents(session, name, gone)
    for digest, state in report.residents.items():
        row = known.get(digest)
        if row is None:
            row = Resident(replica=name, digest=digest)
            session.add(row)
        row.level, row.pinned, row.reason = state.level, state.pinned, state.reason
    await session.flush()
