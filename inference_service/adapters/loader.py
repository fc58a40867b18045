"""The load of an adapter up to host memory: RESOLVING → FETCHING → STAGED, or failed, per digest."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from weakref import WeakValueDictionary

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.blend import Blend, OpenBlend, blend_of, open_blend
from inference_service.adapters.config import Dtype
from inference_service.adapters.counters import Load, LoaderCounters
from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.dora import GainCache
from inference_service.adapters.fetcher import Fetcher
from inference_service.adapters.flights import Flights
from inference_service.adapters.packer import OpenAdapter, open_adapter
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.adapters.store import BUSY_RETRY_SECONDS, HostStore, StagedBlob
from inference_service.adapters.text_files import read_text_files
from inference_service.stats import AdapterStats, Tier, Usage
from inference_service.types import BlendedPart, BlendPart, BlobLayout, PreparedAdapter, StagedAdapter
from shared.base_model import ModelConfig
from shared.errors import AdapterMemory, AdapterNotFound, DigestMismatch, LoraplexError
from shared.references import parse_reference, parse_version_name

log = logging.getLogger(__name__)

FAILURE_MEMORY = 2.0
ROOM_SECONDS = 2.0
MAX_KNOWN = 50_000
DOWNLOADS_PER_ORIGIN = 8  # fewer than there are threads to fetch with: a server that hangs must not take them all


class Resolver(Protocol):
    """What is needed of `registry_client.RegistryClient`. `revision`: the highest that the registry has told."""

    @property
    def revision(self) -> int: ...

    async def resolve(self, reference: str, choice_key: str = "") -> ResolvedVersion: ...


class Tiers(NamedTuple):
    """Where adapters are kept. `arena` is the memory whose ranges `host` hands out."""

    disk: DiskCache
    host: HostStore
    arena: memoryview


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


class _Known:
    """What was learnt of a digest: the versions that have it, last resolved last, or the blend that has it; and its
    layout once it was read."""

    def __init__(self, blend: Blend | None = None) -> None:
        self.versions: dict[str, ResolvedVersion] = {}
        self.blend = blend
        self.layout: BlobLayout | None = None


class AdapterLoader:
    """Prepares adapters for API processes and hands their blobs to the engine. Runs on one event loop.

    `is_arena_free`: False if a living engine may still read what a dead predecessor of this process staged; then
    nothing is written to the arena before `engine_started`.
    """

    def __init__(
        self,
        registry: Resolver,
        fetcher: Fetcher,
        tiers: Tiers,
        packing: Packing,
        workers: Workers,
        *,
        is_arena_free: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._fetcher = fetcher
        self._tiers = tiers
        self._packing = packing
        self._workers = workers
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._flights: Flights[BlobLayout] = Flights(_failure_memory, clock)
        self._clock = clock
        self.counters = LoaderCounters(clock)
        self._room = asyncio.Event()  # set when blobs were released
        self._arena_free = asyncio.Event()
        if is_arena_free:
            self._arena_free.set()

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        """Resolve a canonical reference and bring its files to this machine and, if it is new here and there is room,
        its blob to host memory. `size_bytes` of the answer is the blob's.

        Raises:
            LoraplexError: whatever the registry, the sources, the files or the memory have against it.
        """
        version = await self._resolve(reference, choice_key)
        self._learn(version)
        tier = self._tier(version.digest)
        layout = self._tiers.host.find(version.digest)
        if layout is None:  # read before: the engine may hold it, and acquires it if it does not
            layout = self._known[version.digest].layout
        if layout is None:
            layout = await self._if_room(version.digest, self._stage(version))
        return PreparedAdapter(
            version=version.name,
            digest=version.digest,
            rank=layout.rank,
            size_bytes=layout.nbytes,
            tier=tier,
            texts=version.texts,
            extra_vocab=layout.extra_vocab,
            activation=layout.activation,
        )

    async def prepare_blend(self, parts: Sequence[BlendPart], choice_key: str = "") -> PreparedAdapter:
        """As `prepare`, of the weighted sum of several adapters, which is staged under a digest of its own.

        Raises:
            InvalidArgument: two parts are the same adapter, or a weight is too large for the dtype.
            UnsupportedAdapter: a part is more than LoRA on linears (metadata `field`).
            LoraplexError: as `prepare`.
        """
        versions = [await self._resolve(part.reference, choice_key) for part in parts]
        for version in versions:
            self._learn(version)
        blend = blend_of(versions, [part.weight for part in parts])
        self._learn_blend(blend)
        tier: Tier = "disk" if (layout := self._tiers.host.find(blend.digest)) is None else "host"
        if layout is None:
            layout = self._known[blend.digest].layout
        if layout is None:
            layout = await self._if_room(blend.digest, self._stage_blend(blend))
        return PreparedAdapter(
            version="",
            digest=blend.digest,
            rank=layout.rank,
            size_bytes=layout.nbytes,
            tier=tier,
            parts=tuple(
                BlendedPart(version.name, version.digest, part.weight)
                for version, part in zip(versions, parts, strict=True)
            ),
        )

    async def read_texts(self, digest: str) -> dict[str, bytes]:
        """The tokenizer and chat-template files of an adapter that was prepared, by name; fetched again if need be.

        Raises:
            LoraplexError: as `prepare`.
        """
        version, loop = await self._version(digest), asyncio.get_running_loop()
        lock = self._locks.setdefault(digest, asyncio.Lock())
        async with lock:
            with self._tiers.disk.held(digest):
                for is_last in (False, True):
                    folder = await self._fetch(version)
                    try:
                        pool = self._workers.fetching
                        return await loop.run_in_executor(pool, read_text_files, folder, version.texts)
                    except DigestMismatch:
                        await loop.run_in_executor(self._workers.fetching, self._tiers.disk.discard, digest)
                        if is_last:
                            raise
        raise AssertionError("unreachable")

    async def _fetch(self, version: ResolvedVersion) -> Path:
        async with self._turn(version):
            return await asyncio.get_running_loop().run_in_executor(
                self._workers.fetching, self._fetcher.fetch, version
            )

    def _tier(self, digest: str) -> Tier:
        """The fastest of this process's tiers that holds an adapter."""
        if self._tiers.host.find(digest) is not None:
            return "host"
        return "disk" if self._tiers.disk.has(digest) else "source"

    async def resolve(self, reference: str) -> str:
        """The digest that a canonical reference means; nothing is fetched or staged.

        Where the registry has no answer, a version or digest that was resolved here before still means itself: what
        is deleted there may well be loaded here.

        Raises:
            LoraplexError: what the registry has against it.
        """
        try:
            return (await self._resolve(reference)).digest
        except LoraplexError:
            if (digest := self._remembered(reference)) is None:
                raise
            return digest

    async def _resolve(self, reference: str, choice_key: str = "") -> ResolvedVersion:
        try:
            with self.counters.timed("resolve"):
                return await self._registry.resolve(reference, choice_key)
        except LoraplexError as error:
            self.counters.failures[error.reason] += 1
            raise

    def _remembered(self, reference: str) -> str | None:
        namespace, adapter, number, _, digest = parse_reference(reference, "default")
        for known_digest, known in self._known.items():
            for name in known.versions:
                version = parse_version_name(name, "version")
                is_named = version.version == number or known_digest == digest
                if is_named and (version.namespace, version.adapter) == (namespace, adapter):
                    return known_digest
        return None

    async def acquire(self, digest: str) -> StagedBlob:
        """The blob of `digest`, referenced until `release`; staged again if it was evicted.

        Raises:
            AdapterNotFound: no version of this digest was prepared since this process started, and it is not on disk.
            LoraplexError: as `prepare`; AdapterMemory with `retry_after` when blobs in use leave no room for seconds.
        """
        deadline = self._clock() + ROOM_SECONDS
        while (blob := self._tiers.host.acquire(digest)) is None:
            self._room.clear()
            try:
                await self._stage_digest(digest)
            except AdapterMemory as error:
                if not _is_for_want_of_room(error) or self._clock() >= deadline:
                    raise
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), BUSY_RETRY_SECONDS)
        return blob

    async def _stage_digest(self, digest: str) -> BlobLayout:
        known = self._known.get(digest)
        if known is not None and known.blend is not None:
            return await self._stage_blend(known.blend)
        return await self._stage(await self._version(digest))

    async def _version(self, digest: str) -> ResolvedVersion:
        """The version resolved last, else what the disk tier holds: its digest says what the files must be."""
        known = self._known.get(digest)
        if known is not None and known.versions:
            return next(reversed(known.versions.values()))
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(self._workers.fetching, self._tiers.disk.manifest, digest)
        if files is None:
            raise AdapterNotFound(f"no adapter {digest} is known here", metadata={"digest": digest})
        return ResolvedVersion(digest, 0, "", digest, files, sources=(), rank=0)

    def release(self, digest: str) -> None:
        """The engine has copied the blob."""
        if not self._tiers.host.release(digest):
            log.warning("released without being acquired: %s", digest)
        self._room.set()

    def engine_started(self) -> None:
        """A new engine, or one that is told of this process's start, holds no blob."""
        self._tiers.host.release_all()
        self._arena_free.set()
        self._room.set()

    def drop(self, digest: str) -> int:
        """Forget the blob, once the engine has released it. Its bytes; 0 if there is none."""
        return self._tiers.host.drop(digest)

    def staged(self, digests: Sequence[str] = ()) -> list[StagedAdapter]:
        """Everything in the host and disk tiers, each under every version name that was resolved to it, and what is
        known of further `digests`.

        What was never resolved on this machine has an empty version and rank 0.
        """
        in_host = dict(self._tiers.host.entries())
        found = [item for digest, layout in in_host.items() for item in self._named(digest, "HOST", layout.nbytes)]
        on_disk = dict(self._tiers.disk.entries())
        for digest, nbytes in on_disk.items():
            if digest not in in_host:
                found.extend(self._named(digest, "DISK", nbytes))
        return found + self.known([digest for digest in digests if digest not in in_host and digest not in on_disk])

    def known(self, digests: Sequence[str]) -> list[StagedAdapter]:
        """Under which names `digests` were resolved on this machine, wherever they are now; as `staged`."""
        return [item for digest in digests for item in self._named(digest, "KNOWN", 0)]

    def in_host(self) -> set[str]:
        """Digests whose blobs are in host memory."""
        return {digest for digest, _ in self._tiers.host.entries()}

    def stats(self) -> AdapterStats:
        """How the tiers and the loads are doing."""
        host, disk, counters = self._tiers.host, self._tiers.disk, self.counters
        on_disk = disk.entries()
        return AdapterStats(
            host=host.usage,
            host_held_bytes=host.held_bytes,
            host_adapters=len(list(host.entries())),
            disk=Usage(sum(nbytes for _, nbytes in on_disk), disk.budget),
            disk_adapters=len(on_disk),
            loads_in_flight=counters.loads(),
            load_seconds=counters.seconds,
            fetched_bytes=counters.fetched_bytes,
            failures=dict(counters.failures),
            evictions={"host": host.num_evicted, "disk": disk.num_evicted},
            registry_revision=self._registry.revision,
        )

    def _named(self, digest: str, level: Literal["DISK", "HOST", "KNOWN"], nbytes: int) -> list[StagedAdapter]:
        known = self._known.get(digest)
        names = {v.name: v.rank for v in known.versions.values()} if known else {}
        names = names or dict(self._tiers.disk.names.of(digest)) or {"": 0}
        return [StagedAdapter(name, digest, level, rank, nbytes) for name, rank in names.items()]

    def _learn(self, version: ResolvedVersion) -> None:
        known = self._known.setdefault(version.digest, _Known())
        known.versions.pop(version.name, None)
        known.versions[version.name] = version
        self._touch(version.digest)

    def _learn_blend(self, blend: Blend) -> None:
        self._known.setdefault(blend.digest, _Known(blend))
        self._touch(blend.digest)

    def _touch(self, digest: str) -> None:
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _if_room(self, digest: str, staging: Awaitable[BlobLayout]) -> BlobLayout:
        """Stage; but while blobs in use take all room, files on disk will do: the engine may hold this adapter."""
        try:
            return await staging
        except AdapterMemory as error:
            layout = self._known[digest].layout if digest in self._known else None
            if layout is None or not _is_for_want_of_room(error):
                raise
            return layout

    async def _stage(self, version: ResolvedVersion) -> BlobLayout:
        return await self._flights.run(f"{version.name} {version.digest}", lambda: self._load(version))

    async def _stage_blend(self, blend: Blend) -> BlobLayout:
        return await self._flights.run(blend.digest, lambda: self._load_blend(blend))

    async def _load_blend(self, blend: Blend) -> BlobLayout:
        lock = self._locks.setdefault(blend.digest, asyncio.Lock())
        async with lock:
            if (layout := self._tiers.host.find(blend.digest)) is not None:
                return layout
            with ExitStack() as held, self.counters.loading(blend.digest) as load:
                for part in blend.parts:
                    held.enter_context(self._tiers.disk.held(part.version.digest))
                try:
                    return await self._fetch_and_pack_blend(blend, load)
                except _DamagedCache as damaged:
                    log.warning("%s: %s; fetching its parts again", blend.digest, damaged.error)
                try:
                    return await self._fetch_and_pack_blend(blend, load)
                except _DamagedCache as damaged:
                    raise damaged.error from None

    async def _fetch_and_pack_blend(self, blend: Blend, load: Load) -> BlobLayout:
        loop, (model, dtype) = asyncio.get_running_loop(), self._packing[:2]
        folders = [await self._fetch_alone(part.version) for part in blend.parts]
        load.phase, load.bytes_total = "PACKING", sum(f.size for part in blend.parts for f in part.version.files)
        load.bytes_done = 0
        try:
            with self.counters.timed("pack"):
                opened = await loop.run_in_executor(self._workers.packing, open_blend, blend, folders, model, dtype)
                return await self._pack_opened(opened, load)
        except DigestMismatch as error:
            for part in blend.parts:
                await loop.run_in_executor(self._workers.fetching, self._tiers.disk.discard, part.version.digest)
            raise _DamagedCache(error) from None

    async def _fetch_alone(self, version: ResolvedVersion) -> Path:
        async with self._locks.setdefault(version.digest, asyncio.Lock()):
            return await self._fetch(version)

    async def _load(self, version: ResolvedVersion) -> BlobLayout:
        """One load of a digest at a time; a version whose sources fail does not fail another of the same digest."""
        lock = self._locks.setdefault(version.digest, asyncio.Lock())
        async with lock:
            if (layout := self._tiers.host.find(version.digest)) is not None:
                return layout
            with self._tiers.disk.held(version.digest), self.counters.loading(version.digest) as load:
                try:
                    return await self._fetch_and_pack(version, load)
                except _DamagedCache as damaged:
                    log.warning("%s: %s; fetching it again", version.digest, damaged.error)
                try:
                    return await self._fetch_and_pack(version, load)
                except _DamagedCache as damaged:
                    raise damaged.error from None

    async def _fetch_and_pack(self, version: ResolvedVersion, load: Load) -> BlobLayout:
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        load.phase, load.bytes_done = "FETCHING", 0
        load.bytes_total = sum(file.size for file in version.files)
        with self.counters.timed("fetch"):
            async with self._turn(version):
                folder = await loop.run_in_executor(self._workers.fetching, self._fetcher.fetch, version, load.advance)
        self.counters.fetched_bytes += load.bytes_done
        fetched = time.monotonic()
        load.phase, load.bytes_done = "PACKING", 0
        try:
            with self.counters.timed("pack"):
                layout = await self._pack(version, folder, load)
        except DigestMismatch as error:
            await loop.run_in_executor(self._workers.fetching, self._tiers.disk.discard, version.digest)
            raise _DamagedCache(error) from None
        milliseconds = {
            "fetch_ms": round((fetched - started) * 1e3),
            "pack_ms": round((time.monotonic() - fetched) * 1e3),
        }
        log.info("staged %s", version.name, extra={"digest": version.digest, "bytes": layout.nbytes, **milliseconds})
        return layout

    def _turn(self, version: ResolvedVersion) -> AbstractAsyncContextManager[None]:
        """A place among the downloads from the version's server; what is on disk needs none."""
        if self._tier(version.digest) == "disk" or not version.sources:
            return nullcontext()
        return self._turns.setdefault(version.sources[0].origin, asyncio.Semaphore(DOWNLOADS_PER_ORIGIN))

    async def _pack(self, version: ResolvedVersion, folder: Path, load: Load) -> BlobLayout:
        loop = asyncio.get_running_loop()
        opened = await loop.run_in_executor(self._workers.packing, open_adapter, folder, version.files, *self._packing)
        return await self._pack_opened(opened, load)

    async def _pack_opened(self, opened: OpenAdapter | OpenBlend, load: Load) -> BlobLayout:
        with opened:
            self._known.setdefault(load.digest, _Known()).layout = opened.layout
            await self._arena_free.wait()
            offset = self._tiers.host.reserve(load.digest, opened.layout)
            blob = self._tiers.arena[offset : offset + opened.layout.nbytes]
            await self._fill(opened, blob, load)
        return opened.layout

    async def _fill(self, opened: OpenAdapter | OpenBlend, blob: memoryview, load: Load) -> None:
        loop, workers = asyncio.get_running_loop(), self._workers
        try:
            await loop.run_in_executor(workers.packing, opened.fill, blob, workers.layout, load.advance)
        except BaseException:
            self._tiers.host.abort(load.digest)
            raise
        self._tiers.host.commit(load.digest)


class _DamagedCache(Exception):
    """What the cache held was not what was registered; it is discarded."""

    def __init__(self, error: DigestMismatch) -> None:
        super().__init__(error.message)
        self.error = error


def _is_for_want_of_room(error: AdapterMemory) -> bool:
    """Whether blobs in use fill the arena now."""
    return error.retry_after is not None and error.metadata.get("tier") == "host"


def _failure_memory(error: LoraplexError) -> float:
    """Seconds for which a failure stands. Room in memory may come at any moment."""
    return 0.0 if isinstance(error, AdapterMemory) else FAILURE_MEMORY
