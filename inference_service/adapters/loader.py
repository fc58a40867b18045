"""The load of an adapter up to host memory: RESOLVING → FETCHING → STAGED, or failed, per digest."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from weakref import WeakValueDictionary

from inference_service.adapters.config import Dtype
from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.fetcher import Fetcher
from inference_service.adapters.flights import Flights
from inference_service.adapters.packer import OpenAdapter, open_adapter
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.adapters.store import BUSY_RETRY_SECONDS, HostStore, StagedBlob
from inference_service.types import BlobLayout, PreparedAdapter, StagedAdapter
from shared.base_model import ModelConfig
from shared.errors import AdapterMemory, AdapterNotFound, DigestMismatch, LoraplexError
from shared.references import parse_reference, parse_version_name

log = logging.getLogger(__name__)

FAILURE_MEMORY = 2.0
ROOM_SECONDS = 2.0
MAX_KNOWN = 50_000


class Resolver(Protocol):
    """What is needed of `registry_client.RegistryClient`."""

    async def resolve(self, reference: str, choice_key: str = "") -> ResolvedVersion: ...


class Tiers(NamedTuple):
    """Where adapters are kept. `arena` is the memory whose ranges `host` hands out."""

    disk: DiskCache
    host: HostStore
    arena: memoryview


class Packing(NamedTuple):
    """What blobs are packed for."""

    model: ModelConfig
    dtype: Dtype


class Workers(NamedTuple):
    """Threads for what blocks. A slow source must not keep others' packing waiting, hence two pools."""

    fetching: Executor
    packing: Executor


class _Known:
    """What was learnt of a digest: the versions that have it, last resolved last, and its layout once it was read."""

    def __init__(self) -> None:
        self.versions: dict[str, ResolvedVersion] = {}
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
        self._flights: Flights[BlobLayout] = Flights(_failure_memory, clock)
        self._clock = clock
        self._room = asyncio.Event()  # set when blobs were released
        self._arena_free = asyncio.Event()
        if is_arena_free:
            self._arena_free.set()

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        """Resolve a canonical reference and bring its files to this machine and, if there is room, its blob to host
        memory. `size_bytes` of the answer is the blob's.

        Raises:
            LoraplexError: whatever the registry, the sources, the files or the memory have against it.
        """
        version = await self._registry.resolve(reference, choice_key)
        self._learn(version)
        layout = self._tiers.host.find(version.digest)
        if layout is None:
            layout = await self._stage_if_room(version)
        return PreparedAdapter(
            version=version.name,
            digest=version.digest,
            rank=layout.rank,
            size_bytes=layout.nbytes,
            has_tokenizer=version.has_tokenizer,
            has_chat_template=version.has_chat_template,
        )

    async def resolve(self, reference: str) -> str:
        """The digest that a canonical reference means; nothing is fetched or staged.

        Where the registry has no answer, a version or digest that was resolved here before still means itself: what
        is deleted there may well be loaded here.

        Raises:
            LoraplexError: what the registry has against it.
        """
        try:
            return (await self._registry.resolve(reference)).digest
        except LoraplexError:
            if (digest := self._remembered(reference)) is None:
                raise
            return digest

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
            version = await self._version(digest)
            self._room.clear()
            try:
                await self._stage(version)
            except AdapterMemory as error:
                if not _is_for_want_of_room(error) or self._clock() >= deadline:
                    raise
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), BUSY_RETRY_SECONDS)
        return blob

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
        for digest in digests:
            if digest not in in_host and digest not in on_disk:
                found.extend(self._named(digest, "KNOWN", 0))
        return found

    def _named(self, digest: str, level: Literal["DISK", "HOST", "KNOWN"], nbytes: int) -> list[StagedAdapter]:
        known = self._known.get(digest)
        names = {v.name: v.rank for v in known.versions.values()} if known else {}
        names = names or dict(self._tiers.disk.names.of(digest)) or {"": 0}
        return [StagedAdapter(name, digest, level, rank, nbytes) for name, rank in names.items()]

    def _learn(self, version: ResolvedVersion) -> None:
        known = self._known.setdefault(version.digest, _Known())
        known.versions.pop(version.name, None)
        known.versions[version.name] = version
        self._known.move_to_end(version.digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _stage_if_room(self, version: ResolvedVersion) -> BlobLayout:
        """Stage; but while blobs in use take all room, files on disk will do: the engine may hold this adapter."""
        try:
            return await self._stage(version)
        except AdapterMemory as error:
            layout = self._known[version.digest].layout if version.digest in self._known else None
            if layout is None or not _is_for_want_of_room(error):
                raise
            return layout

    async def _stage(self, version: ResolvedVersion) -> BlobLayout:
        return await self._flights.run(f"{version.name} {version.digest}", lambda: self._load(version))

    async def _load(self, version: ResolvedVersion) -> BlobLayout:
        """One load of a digest at a time; a version whose sources fail does not fail another of the same digest."""
        lock = self._locks.setdefault(version.digest, asyncio.Lock())
        async with lock:
            if (layout := self._tiers.host.find(version.digest)) is not None:
                return layout
            with self._tiers.disk.held(version.digest):
                try:
                    return await self._fetch_and_pack(version)
                except _DamagedCache as damaged:
                    log.warning("%s: %s; fetching it again", version.digest, damaged.error)
                try:
                    return await self._fetch_and_pack(version)
                except _DamagedCache as damaged:
                    raise damaged.error from None

    async def _fetch_and_pack(self, version: ResolvedVersion) -> BlobLayout:
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        folder = await loop.run_in_executor(self._workers.fetching, self._fetcher.fetch, version)
        fetched = time.monotonic()
        try:
            layout = await self._pack(version, folder)
        except DigestMismatch as error:
            await loop.run_in_executor(self._workers.fetching, self._tiers.disk.discard, version.digest)
            raise _DamagedCache(error) from None
        milliseconds = {
            "fetch_ms": round((fetched - started) * 1e3),
            "pack_ms": round((time.monotonic() - fetched) * 1e3),
        }
        log.info("staged %s", version.name, extra={"digest": version.digest, "bytes": layout.nbytes, **milliseconds})
        return layout

    async def _pack(self, version: ResolvedVersion, folder: Path) -> BlobLayout:
        loop = asyncio.get_running_loop()
        model, dtype = self._packing
        opened = await loop.run_in_executor(self._workers.packing, open_adapter, folder, version.files, model, dtype)
        with opened:
            self._known.setdefault(version.digest, _Known()).layout = opened.layout
            await self._arena_free.wait()
            offset = self._tiers.host.reserve(version.digest, opened.layout)
            blob = self._tiers.arena[offset : offset + opened.layout.nbytes]
            await self._fill(version.digest, opened, blob)
        return opened.layout

    async def _fill(self, digest: str, opened: OpenAdapter, blob: memoryview) -> None:
        filling = asyncio.get_running_loop().run_in_executor(self._workers.packing, opened.fill, blob)
        try:
            await filling
        except BaseException:
            self._tiers.host.abort(digest)
            raise
        self._tiers.host.commit(digest)


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
