"""Places among the downloads under way: of one tenant, at most so many from one origin, and so many in all.

So an origin that hangs holds up only what its tenant wants from it, and a tenant all of whose origins hang only
itself, as long as there are threads for several tenants (`process.NUM_FETCHERS`). And it does so for a while only: a
download that brings nothing is given up (`shared.sources.policy.Patience`; `download.STALL_SECONDS` for what that
misses).
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from inference_service.adapters.resolution import ResolvedVersion
from shared.references import parse_version_name

PER_ORIGIN = 8
PER_TENANT = 24


class DownloadTurns:
    """Hands out places, in order of asking. On one event loop."""

    def __init__(self) -> None:
        self._places: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, version: ResolvedVersion) -> AsyncIterator[None]:
        """A place for the download of `version`; its tenant is the adapter's namespace."""
        tenant = parse_version_name(version.name, "version.name").namespace
        # The origin's first: whoever waits for a place there must hold none that other origins could use.
        async with self._of((tenant, version.sources[0].origin), PER_ORIGIN), self._of(tenant, PER_TENANT):
            yield

    def _of(self, whose: Hashable, count: int) -> asyncio.Semaphore:
        return self._places.setdefault(whose, asyncio.Semaphore(count))
