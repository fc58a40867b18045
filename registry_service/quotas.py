"""How much a namespace may hold. What is deleted does not count, so an undelete is looked at like a registration.

`lock` first, then `check`, in the transaction that writes: of writers in one namespace each sees what the one before it
has committed, and together they cannot exceed what none exceeds alone.
"""

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from registry_service.models import DELETED, Adapter, AdapterVersion
from shared.errors import NamespaceQuota
from shared.ranges import between
from shared.references import namespace_name

is_quota = between(0, (1 << 62) - 1)  # a `check` for a limit; the database counts in 64 bits
_LOCK_SEED = 0x71756F74  # sets these locks apart from others in the database


class Amounts(NamedTuple):
    """What a namespace holds, adds or may hold; as a limit 0 is none."""

    adapters: int = 0
    versions: int = 0
    bytes: int = 0


class Quotas:
    """The limits of one registry: `own` by namespace, and `usual` wherever a namespace has none of its own."""

    def __init__(self, usual: Amounts, own: Mapping[str, Amounts]) -> None:
        self._usual = usual
        self._own = own

    def limits(self, namespace: str) -> Amounts:
        """What a namespace may hold."""
        own = self._own.get(namespace, Amounts())
        return Amounts(*(mine or usual for mine, usual in zip(own, self._usual, strict=True)))

    async def lock(self, session: AsyncSession, namespace: str) -> None:
        """Until commit nobody else adds to the namespace. Call it before any row is locked.

        On SQLite a transaction that writes is alone anyway.
        """
        if any(self.limits(namespace)) and session.get_bind().dialect.name == "postgresql":
            key = func.hashtextextended(namespace, _LOCK_SEED)
            await session.execute(select(func.pg_advisory_xact_lock(key)))

    async def check(self, session: AsyncSession, namespace: str, adding: Amounts) -> None:
        """Returns if the namespace may hold so much more.

        Raises:
            NamespaceQuota: metadata names the `quota`, its `limit` and what is `used`.
        """
        limits = self.limits(namespace)
        if not any(limits):
            return
        held = await _held(session, namespace)
        for quota, limit, used, more in zip(Amounts._fields, limits, held, adding, strict=True):
            if limit and more and used + more > limit:
                raise NamespaceQuota(
                    f"{namespace_name(namespace)} may hold {limit} {quota}, has {used}, and this adds {more}",
                    metadata={"namespace": namespace, "quota": quota, "limit": str(limit), "used": str(used)},
                )


async def amounts_of(session: AsyncSession, adapter: Adapter) -> Amounts:
    """What one adapter would add, if it is deleted now."""
    query = select(func.count(), func.coalesce(func.sum(AdapterVersion.size_bytes), 0)).where(
        AdapterVersion.adapter_uid == adapter.uid, AdapterVersion.state != DELETED
    )
    versions, nbytes = (await session.execute(query)).one()
    return Amounts(1, versions, int(nbytes))


async def _held(session: AsyncSession, namespace: str) -> Amounts:
    """Live adapters and their live versions."""
    live = (Adapter.namespace == namespace, Adapter.delete_time.is_(None))
    adapters = (await session.execute(select(func.count()).select_from(Adapter).where(*live))).scalar_one()
    query = (
        select(func.count(), func.coalesce(func.sum(AdapterVersion.size_bytes), 0))
        .join(Adapter, Adapter.uid == AdapterVersion.adapter_uid)
        .where(*live, AdapterVersion.state != DELETED)
    )
    versions, nbytes = (await session.execute(query)).one()
    return Amounts(adapters, versions, int(nbytes))
