"""The load of an adapter up to host memory: RESOLVING → FETCHING → STAGED, or failed, per digest."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from typing import Literal, Protocol

from inference_service.adapters.blend import blend_of
from inference_service.adapters.counters import LoaderCounters
from inference_service.adapters.fetcher import Fetcher
from inference_service.adapters.known import KnownAdapters
from inference_service.adapters.resolution import ResolvedVersion, forgotten, of_another_process
from inference_service.adapters.staging import Packing, Staging, Tiers, Workers
from inference_service.adapters.store import BUSY_RETRY_SECONDS, StagedBlob
from inference_service.stats import AdapterStats, Tier, Usage
from inference_service.types import BlendedPart, BlendPart, BlobLayout, PreparedAdapter, StagedAdapter
from shared.blend_errors import of_part
from shared.errors import AdapterMemory, BaseModelConflict, LoraplexError

log = logging.getLogger(__name__)

ROOM_SECONDS = 2.0


class Resolver(Protocol):
    """What is needed of `registry_client.RegistryClient`, where these are explained."""

    @property
    def revision(self) -> int: ...
    @property
    def lag(self) -> int: ...
    @property
    def heard_at(self) -> float | None: ...
    @property
    def base_model_conflict(self) -> BaseModelConflict | None: ...

    async def resolve(
        self, reference: str, choice_key: str = "", *, registered_only: bool = False
    ) -> ResolvedVersion: ...


class AdapterLoader:
    """Prepares adapters for API processes and hands their blobs to the engine. Runs on one event loop.

    `is_arena_free`: see `Staging`; it becomes free with `engine_started`.
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
        self._tiers = tiers
        self._workers = workers
        self._known = KnownAdapters(tiers.disk.names)
        self._clock = clock
        self.counters = LoaderCounters(clock)
        self._staging = Staging(
            fetcher, tiers, packing, workers, self._known, self.counters, is_arena_free=is_arena_free, clock=clock
        )
        self._room = asyncio.Event()  # set when blobs were released

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        """Resolve a canonical reference and bring its files to this machine and, if it is new here and there is room,
        its blob to host memory. `size_bytes` of the answer is the blob's.

        Raises:
            BaseModelConflict: the registry's adapters are for another base model of this id.
            LoraplexError: whatever the registry, the sources, the files or the memory have against it.
        """
        version = await self._resolve_for_use(reference, choice_key)
        self._known.learn(version)
        tier = self._tier(version.digest)
        layout = self._layout(version.digest)
        if layout is None:
            layout = await self._if_room(version.digest, self._staging.stage(version))
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
        versions = []
        for position, part in enumerate(parts):
            with of_part(f"blend[{position}]"):
                versions.append(await self._resolve_for_use(part.reference, choice_key))
        for version in versions:
            self._known.learn(version)
        blend = blend_of(versions, [part.weight for part in parts])
        self._known.learn_blend(blend)
        tier: Tier = "disk" if self._tiers.host.find(blend.digest) is None else "host"
        layout = self._layout(blend.digest)
        if layout is None:
            layout = await self._if_room(blend.digest, self._staging.stage_blend(blend))
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
        return await self._staging.read_texts(await self._version(digest))

    def _layout(self, digest: str) -> BlobLayout | None:
        """Of a blob in host memory; else of one that was read before, which the engine may hold, or acquires."""
        return self._tiers.host.find(digest) or self._known.layout(digest)

    def _tier(self, digest: str) -> Tier:
        """The fastest of this process's tiers that holds an adapter."""
        if self._tiers.host.find(digest) is not None:
            return "host"
        return "disk" if self._tiers.disk.has(digest) else "source"

    async def resolve(self, reference: str) -> str:
        """The digest that a canonical reference means; nothing is fetched or staged, and no unknown adapter registered.

        Where the registry has no answer, a version or digest that was resolved here before still means itself: what
        is deleted there may well be loaded here.

        Raises:
            LoraplexError: what the registry has against it.
        """
        try:
            return (await self._resolve(reference, registered_only=True)).digest
        except LoraplexError:
            if (digest := self._known.digest_of(reference)) is None:
                raise
            return digest

    async def _resolve(self, reference: str, choice_key: str = "", *, registered_only: bool = False) -> ResolvedVersion:
        try:
            with self.counters.timed("resolve"):
                return await self._registry.resolve(reference, choice_key, registered_only=registered_only)
        except LoraplexError as error:
            self.counters.failures[error.reason] += 1
            raise

    async def _resolve_for_use(self, reference: str, choice_key: str) -> ResolvedVersion:
        """As `resolve`, but of what is to run: never on other weights than it was registered for."""
        self._check_base_model()
        version = await self._resolve(reference, choice_key)
        self._check_base_model()
        return version

    def _check_base_model(self) -> None:
        """Raises BaseModelConflict if the registry's adapters are not for the base model that is served here."""
        if (conflict := self.base_model_conflict) is not None:
            self.counters.failures[conflict.reason] += 1
            raise BaseModelConflict(conflict.message, metadata=conflict.metadata)

    @property
    def base_model_conflict(self) -> BaseModelConflict | None:
        """Why no adapter is served here: the registry has another base model of this id."""
        return self._registry.base_model_conflict

    async def acquire(self, digest: str) -> StagedBlob:
        """The blob of `digest`, referenced until `release`; staged again if it was evicted.

        Raises:
            SourceUnavailable: it was prepared by a process before this one, and is not on disk; with `retry_after`.
            LoraplexError: as `prepare`; AdapterMemory with `retry_after` when blobs in use leave no room for seconds.
        """
        self._check_base_model()
        deadline = self._clock() + ROOM_SECONDS
        while (blob := self._tiers.host.acquire(digest)) is None:
            self._room.clear()
            try:
                await self._stage_digest(digest)
            except AdapterMemory as error:
                if not _is_for_want_of_room(error) or self._clock() >= deadline:
                    raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_RETRY_SECONDS):
                        await self._room.wait()
        return blob

    async def _stage_digest(self, digest: str) -> BlobLayout:
        if (blend := self._known.blend(digest)) is not None:
            return await self._staging.stage_blend(blend)
        return await self._staging.stage(await self._version(digest))

    async def _version(self, digest: str) -> ResolvedVersion:
        """The version resolved last, else what the disk tier holds: its digest says what the files must be."""
        if (version := self._known.version(digest)) is not None:
            return version
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(self._workers.fetching, self._tiers.disk.manifest, digest)
        if files is None:
            raise forgotten(digest)
        return of_another_process(digest, files)

    def release(self, digest: str) -> None:
        """The engine has copied the blob."""
        if not self._tiers.host.release(digest):
            log.warning("released without being acquired: %s", digest)
        self._room.set()

    def engine_started(self) -> None:
        """A new engine, or one that is told of this process's start, holds no blob."""
        self._tiers.host.release_all()
        self._staging.free_arena()
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

    def keep_on_disk(self, digests: Set[str]) -> None:
        """From now on the files of `digests`, and of no others, are kept whatever needs the room."""
        self._tiers.disk.keep(digests)

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
            registry_lag=self._registry.lag,
            registry_heard_at=self._registry.heard_at,
            base_model_conflict=self.base_model_conflict.message if self.base_model_conflict else "",
        )

    def _named(self, digest: str, level: Literal["DISK", "HOST", "KNOWN"], nbytes: int) -> list[StagedAdapter]:
        names = self._known.names(digest)
        return [StagedAdapter(name, digest, level, rank, nbytes) for name, rank in names.items()]

    async def _if_room(self, digest: str, staging: Awaitable[BlobLayout]) -> BlobLayout:
        """Stage; but while blobs in use take all room, files on disk will do: the engine may hold this adapter."""
        try:
            return await staging
        except AdapterMemory as error:
            layout = self._known.layout(digest)
            if layout is None or not _is_for_want_of_room(error):
                raise
            return layout


def _is_for_want_of_room(error: AdapterMemory) -> bool:
    """Whether blobs in use fill the arena now."""
    return error.retry_after is not None and error.metadata.get("tier") == "host"
