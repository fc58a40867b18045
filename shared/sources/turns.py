"""Places among those who read sources at once: of one tenant, at most so many from one origin, and so many in all.

So an origin that hangs holds up only what its tenant wants from it, and a tenant all of whose origins hang only itself,
as long as there are threads for several tenants. And it does so for a while only: a source that brings nothing is given
up (`policy.Patience`).
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class SourceTurns:
    """Hands out places, in order of asking. On one event loop.

    Args:
        per_origin: Places of one tenant at one `PinnedSource.origin`.
        per_tenant: Places of one tenant.
    """

    def __init__(self, per_origin: int, per_tenant: int) -> None:
        self._per_origin = per_origin
        self._per_tenant = per_tenant
        self._places: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, tenant: str, origin: str) -> AsyncIterator[None]:
        """A place for reading from `origin`; the tenant is the adapter's namespace."""
        # The origin's first: whoever waits for a place there must hold none that other origins could use.
        async with self._of((tenant, origin), self._per_origin), self._of(tenant, self._per_tenant):
            yield

    def _of(self, whose: Hashable, count: int) -> asyncio.Semaphore:
        return self._places.setdefault(whose, asyncio.Semaphore(count))
