"""Who waits for whom among those who read sources."""

import asyncio
from collections.abc import Sequence

from shared.sources.resolver import PinnedSource
from shared.sources.turns import SourceTurns

PER_ORIGIN, PER_TENANT = 8, 24


class Downloads:
    """Downloads that hang until they are ended; `under_way` are those that have a place."""

    def __init__(self) -> None:
        self.turns = SourceTurns(PER_ORIGIN, PER_TENANT)
        self.under_way: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, tenant: str, uris: Sequence[str]) -> None:
        for uri in uris:
            self.tasks[tenant + uri] = asyncio.create_task(self._hang(tenant, uri))
        await self._settled()

    async def end(self, key: str) -> None:
        self.tasks[key].cancel()
        await self._settled()

    async def _hang(self, tenant: str, uri: str) -> None:
        async with self.turns.turn(tenant, PinnedSource(uri).origin):
            self.under_way.append(tenant + uri)
            try:
                await asyncio.Event().wait()
            finally:
                self.under_way.remove(tenant + uri)

    async def _settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


def many(origin: str, count: int) -> list[str]:
    return [f"{origin}/a{number}" for number in range(count)]


async def test_an_origin_that_hangs_holds_up_its_tenants_downloads_from_it_only() -> None:
    downloads = Downloads()
    await downloads.start("one", many("s3://dead", 40))
    assert downloads.under_way == [f"one{uri}" for uri in many("s3://dead", PER_ORIGIN)]
    await downloads.start("two", ["s3://dead/x"])
    await downloads.start("one", ["hf://org/x", "s3://other/x"])
    assert downloads.under_way[PER_ORIGIN:] == ["twos3://dead/x", "onehf://org/x", "ones3://other/x"]
    await downloads.end("ones3://dead/a3")
    assert downloads.under_way[-1] == f"ones3://dead/a{PER_ORIGIN}"


async def test_origins_that_hang_hold_up_their_own_tenant_only() -> None:
    downloads = Downloads()
    for number in range(PER_TENANT // PER_ORIGIN + 2):
        await downloads.start("one", many(f"s3://dead{number}", 40))
    assert len(downloads.under_way) == PER_TENANT
    await downloads.start("two", ["s3://dead0/x", "hf://org/x"])
    assert downloads.under_way[PER_TENANT:] == ["twos3://dead0/x", "twohf://org/x"]
