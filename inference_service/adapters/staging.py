"""Brings blobs to host memory: FETCHING → PACKING → committed, or failed; one attempt at a time per digest."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from typing import NamedTuple, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.blend import Blend, OpenBlend, open_blend
from inference_service.adapters.config import Dtype
from inference_service.adapters.counters import Load, LoaderCounters
from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.dora import GainCache
from inference_service.adapters.download import ignore
from inference_service.adapters.fetcher import Fetched, Fetcher
from inference_service.adapters.flights import Flights
from inference_service.adapters.known import KnownAdapters
from inference_service.adapters.packer import OpenAdapter, open_adapter
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.adapters.sizes import Capacity, together
from inference_service.adapters.store import HostStore
from inference_service.adapters.text_files import read_text_files
from inference_service.types import BlobLayout
from shared.base_model import ModelConfig
from shared.blend_errors import of_part
from shared.errors import AdapterMemory, DigestMismatch, LoraplexError
from shared.references import parse_version_name
from shared.sources.turns import SourceTurns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

FAILURE_MEMORY = 2.0
PER_ORIGIN, PER_TENANT = 8, 24  # downloads under way: of a tenant from one origin, and of a tenant


class Tiers(NamedTuple):
    """Where adapters are kept. `arena` is the memory whose ranges `host` hands out; `device_bytes` the size of the
    engine's, 0 if that is not known."""

    disk: DiskCache
    host: HostStore
    arena: memoryview
    device_bytes: int = 0

    @property
    def capacity(self) -> Capacity:
        """What there is, for any adapter alone."""
        return Capacity(self.disk.budget, self.host.usage.total, self.device_bytes)


class Packing(NamedTuple):
    """What blobs are packed for: see `open_adapter`."""

    model: ModelConfig
    dtype: Dtype
    base: BaseTensors | None = None
    gains: GainCache | None = None


class Workers(NamedTuple):
    """Threads for what blocks. A slow source must not keep others' packing waiting, and what packs waits for what lays
    out: hence three pools."""

    fetching: Executor
    packing: Executor
    layout: Executor


class _Recipe(NamedTuple):
    """What a blob is made of: versions whose files are fetched, and how they are opened."""

    name: str
    digest: str
    versions: tuple[ResolvedVersion, ...]
    open: Callable[[Sequence[Fetched]], OpenAdapter | OpenBlend]
    fields: tuple[str, ...] = ("",)  # of a blend: which part of it each version is

    @property
    def version_names(self) -> list[str]:
        """In the order of the versions."""
        return [version.name for version in self.versions]


class Staging:
    """Loads of adapters and blends. Runs on one event loop.

    `is_arena_free`: False if a living engine may still read what a dead predecessor of this process staged; then
    nothing is written to the arena before `free_arena`.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        tiers: Tiers,
        packing: Packing,
        workers: Workers,
        known: KnownAdapters,
        counters: LoaderCounters,
        *,
        is_arena_free: bool,
        clock: Callable[[], float],
    ) -> None:
        self._fetcher = fetcher
        self._tiers = tiers
        self._packing = packing
        self._workers = workers
        self._known = known
        self._counters = counters
        self._turns = SourceTurns(PER_ORIGIN, PER_TENANT)
        self._flights: Flights[BlobLayout] = Flights(_failure_memory, clock)
        self._fetches: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._loads: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._arena_free = asyncio.Event()
        if is_arena_free:
            self._arena_free.set()

    def free_arena(self) -> None:
        """Nobody reads what was staged by another process any more."""
        self._arena_free.set()

    async def stage(self, version: ResolvedVersion) -> BlobLayout:
        """Have an adapter in host memory.

        Raises:
            LoraplexError: what its sources, its files or the memory have against it.
        """

        def opened(fetched: Sequence[Fetched]) -> OpenAdapter:
            (folder, is_verified), packing = fetched[0], self._packing
            return open_adapter(folder, version.files, *packing, is_verified=is_verified)

        return await self._stage(_Recipe(version.name, version.digest, (version,), opened))

    async def stage_blend(self, blend: Blend) -> BlobLayout:
        """Have a blend in host memory. Raises as `stage`."""

        def opened(fetched: Sequence[Fetched]) -> OpenBlend:
            packing = self._packing
            return open_blend(blend, fetched, packing.model, packing.dtype, packing.base)

        versions = tuple(part.version for part in blend.parts)
        fields = tuple(part.field for part in blend.parts)
        return await self._stage(_Recipe("a blend", blend.digest, versions, opened, fields))

    async def read_texts(self, version: ResolvedVersion) -> dict[str, bytes]:
        """The tokenizer and chat-template files of an adapter, by name; fetched again if need be. Raises as `stage`."""
        with self._tiers.disk.held(version.digest):
            for is_last in (False, True):
                folder, _ = await self._fetch(version)
                try:
                    return await _run(self._workers.fetching, read_text_files, folder, version.texts)
                except DigestMismatch:
                    await self._discard(version)
                    if is_last:
                        raise
        raise AssertionError("unreachable")

    async def _stage(self, recipe: _Recipe) -> BlobLayout:
        # A version whose sources fail does not fail another of the same digest: hence the name.
        return await self._flights.run(f"{recipe.name} {recipe.digest}", lambda: self._load(recipe))

    async def _load(self, recipe: _Recipe) -> BlobLayout:
        async with self._loads.setdefault(recipe.digest, asyncio.Lock()):
            if (layout := self._tiers.host.find(recipe.digest)) is not None:
                return layout
            with ExitStack() as held, self._counters.loading(recipe.digest) as load:
                for version in recipe.versions:
                    held.enter_context(self._tiers.disk.held(version.digest))
                self._check_size(recipe)
                try:
                    return await self._fetch_and_pack(recipe, load)
                except _DamagedCache as damaged:
                    log.warning("%s: %s; fetching it again", recipe.digest, damaged.error)
                try:
                    return await self._fetch_and_pack(recipe, load)
                except _DamagedCache as damaged:
                    raise damaged.error from None

    def _check_size(self, recipe: _Recipe) -> None:
        """As far as it is known before the files are here. Raises AdapterMemory."""
        files = sum(file.size for version in recipe.versions for file in version.files)
        packed = together([version.packed for version in recipe.versions])
        self._tiers.capacity.check(recipe.version_names, files, packed.at_least(self._packing.dtype))

    async def _fetch_and_pack(self, recipe: _Recipe, load: Load) -> BlobLayout:
        started = time.monotonic()
        load.phase, load.bytes_done = "FETCHING", 0
        load.bytes_total = sum(file.size for version in recipe.versions for file in version.files)
        with self._counters.timed("fetch"):
            fetched = []
            for version, field in zip(recipe.versions, recipe.fields, strict=True):
                with of_part(field):
                    fetched.append(await self._fetch(version, load.advance))
        self._counters.fetched_bytes += load.bytes_done
        fetched_at = time.monotonic()
        load.phase, load.bytes_done = "PACKING", 0
        try:
            with self._counters.timed("pack"):
                layout = await self._pack(recipe, fetched, load)
        except DigestMismatch as error:
            for version in recipe.versions:
                await self._discard(version)
            raise _DamagedCache(error) from None
        milliseconds = {
            "fetch_ms": round((fetched_at - started) * 1e3),
            "pack_ms": round((time.monotonic() - fetched_at) * 1e3),
        }
        log.info("staged %s", recipe.name, extra={"digest": recipe.digest, "bytes": layout.nbytes, **milliseconds})
        return layout

    async def _fetch(self, version: ResolvedVersion, on_bytes: Callable[[int], None] = ignore) -> Fetched:
        """One download of a digest at a time; what is on disk needs no turn."""
        async with self._fetches.setdefault(version.digest, asyncio.Lock()):
            needs_turn = version.sources and not self._tiers.disk.has(version.digest)
            async with self._turn(version) if needs_turn else nullcontext():
                return await _run(self._workers.fetching, self._fetcher.fetch, version, on_bytes)

    def _turn(self, version: ResolvedVersion) -> AbstractAsyncContextManager[None]:
        tenant = parse_version_name(version.name, "version.name").namespace
        return self._turns.turn(tenant, version.sources[0].origin)

    async def _discard(self, version: ResolvedVersion) -> None:
        await _run(self._workers.fetching, self._tiers.disk.discard, version.digest)

    async def _pack(self, recipe: _Recipe, fetched: Sequence[Fetched], load: Load) -> BlobLayout:
        host, workers, digest = self._tiers.host, self._workers, recipe.digest
        with await _run(workers.packing, recipe.open, fetched) as opened:
            layout = opened.layout
            self._tiers.capacity.check(recipe.version_names, 0, layout.nbytes)
            self._known.learn_layout(digest, layout)
            await self._arena_free.wait()
            offset = host.reserve(digest, layout)
            blob = self._tiers.arena[offset : offset + layout.nbytes]
            try:
                await _run(workers.packing, opened.fill, blob, workers.layout, load.advance)
            except BaseException:
                host.abort(digest)
                raise
            host.commit(digest)
        return layout


class _DamagedCache(Exception):
    """What the cache held was not what was registered; it is discarded."""

    def __init__(self, error: DigestMismatch) -> None:
        super().__init__(error.message)
        self.error = error


async def _run(pool: Executor, call: Callable[[*Ts], T], *args: *Ts) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, call, *args)


def _failure_memory(error: LoraplexError) -> float:
    """Seconds for which a failure stands. Room in memory may come at any moment."""
    return 0.0 if isinstance(error, AdapterMemory) else FAILURE_MEMORY
