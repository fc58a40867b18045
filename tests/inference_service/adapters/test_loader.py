"""The loader in this process: how far a load is, and who waits for whom."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inference_service.adapters.config import Dtype
from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.fetcher import Fetcher
from inference_service.adapters.loader import AdapterLoader
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.adapters.sizes import PackedSize
from inference_service.adapters.staging import Packing, Tiers, Workers
from inference_service.adapters.store import HostStore
from inference_service.stats import LoadInFlight
from inference_service.types import BlendPart
from shared.adapter_format.files import WEIGHTS
from shared.errors import AdapterMemory, BaseModelConflict, DigestMismatch
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource, Source, SourceFile, open_source
from tests.inference_service.adapters.small_adapters import MODEL, flip_a_bit, version_of, write_adapter

HOST_BYTES = 16 << 10


class GatedFile:
    """A file of which the bytes behind the first `size` come when `gate` is opened."""

    def __init__(self, file: SourceFile, size: int, gate: threading.Event) -> None:
        self._file, self._left, self._gate = file, size, gate

    def __enter__(self) -> "GatedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        if not self._left:
            self._gate.wait(20)
            return self._file.read(count)
        piece = self._file.read(min(count, self._left))
        self._left -= len(piece)
        return piece


class GatedSource:
    """A folder whose weights stop after 1000 bytes until `gate` is opened."""

    def __init__(self, source: Source, gate: threading.Event) -> None:
        self._source, self._gate = source, gate

    def open(self, path: str) -> GatedFile | SourceFile:
        file = self._source.open(path)
        return GatedFile(file, 1000, self._gate) if path == WEIGHTS else file


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


class Bench:
    """A loader over real folders, and a registry that knows one version of each."""

    def __init__(self, folder: Path, host_bytes: int, dtype: Dtype, device_bytes: int) -> None:
        self.folder = folder
        self.gate = open_gate()
        self.known: dict[str, ResolvedVersion] = {}  # whose files have changed since
        self.cache = DiskCache(folder / "cache", 1 << 20)
        self.fetcher = Fetcher(self.cache, SourcePolicy({"root": folder / "root"}), self._open)
        self.workers = Workers(ThreadPoolExecutor(8), ThreadPoolExecutor(2), ThreadPoolExecutor(2))
        self.revision, self.lag, self.heard_at = 7, 0, None
        self.base_model_conflict: BaseModelConflict | None = None
        tiers = Tiers(self.cache, HostStore(host_bytes), memoryview(bytearray(host_bytes)), device_bytes)
        self.loader = AdapterLoader(self, self.fetcher, tiers, Packing(MODEL, dtype), self.workers)

    def _open(self, pinned: PinnedSource, namespace: str, policy: SourcePolicy, stopping: threading.Event) -> Source:
        return GatedSource(open_source(pinned, namespace, policy, stopping, reader="replica"), self.gate)  # type: ignore[return-value]

    async def resolve(self, reference: str, choice_key: str = "", *, registered_only: bool = False) -> ResolvedVersion:
        name = reference.removeprefix("default/")
        return self.known.get(name) or version_of(self.folder / "root" / name, name)

    def add(self, name: str, **shape: object) -> ResolvedVersion:
        folder = self.folder / "root" / name
        write_adapter(folder, seed=len(name), **shape)  # type: ignore[arg-type]
        return version_of(folder, name)

    def close(self) -> None:
        self.gate.set()
        for pool in self.workers:
            pool.shutdown()
        self.cache.close()


@asynccontextmanager
async def running(
    folder: Path, host_bytes: int = HOST_BYTES, dtype: Dtype = "float32", device_bytes: int = 0
) -> AsyncIterator[Bench]:
    bench = Bench(folder, host_bytes, dtype, device_bytes)
    try:
        yield bench
    finally:
        bench.close()


async def eventually(found: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not found():  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.005)


async def test_a_load_shows_how_far_it_is_and_delays_no_other(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        version = bench.add("slow")
        total = sum(file.size for file in version.files)
        bench.gate.clear()
        slow = asyncio.create_task(bench.loader.prepare("default/slow"))

        def loads() -> list[LoadInFlight]:
            return bench.loader.stats().loads_in_flight

        await eventually(lambda: loads() and loads()[0].bytes_done >= 1000)
        (load,) = loads()
        assert (load.digest, load.phase, load.bytes_total) == (version.digest, "FETCHING", total)
        assert load.bytes_done < total
        assert load.progress == pytest.approx(load.bytes_done / total)
        assert bench.loader.stats().fetched_bytes == 0
        bench.gate.set()
        assert (await slow).digest == version.digest
        stats = bench.loader.stats()
        assert (stats.loads_in_flight, stats.fetched_bytes) == ([], total)
        assert stats.registry_revision == 7


async def test_while_one_source_hangs_others_load(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.add("slow")
        bench.gate.clear()
        slow = asyncio.create_task(bench.loader.prepare("default/slow"))
        await eventually(lambda: any(load.bytes_done >= 1000 for load in bench.loader.stats().loads_in_flight))
        shut, bench.gate = bench.gate, open_gate()
        bench.add("quick")
        async with asyncio.timeout(60):
            assert (await bench.loader.prepare("default/quick")).tier == "source"
        assert not slow.done()
        shut.set()
        assert (await slow).tier == "source"


async def test_a_failed_load_is_counted_and_ends_nobody_elses(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.add("good")
        bench.add("flipped")
        known = version_of(tmp_path / "root" / "flipped", "flipped")
        flip_a_bit(tmp_path / "root" / "flipped" / WEIGHTS)
        bench.known["flipped"] = known
        good, bad = await asyncio.gather(
            bench.loader.prepare("default/good"), bench.loader.prepare("default/flipped"), return_exceptions=True
        )
        assert isinstance(bad, DigestMismatch)
        assert not isinstance(good, BaseException)
        assert bench.loader.stats().failures == {"DIGEST_MISMATCH": 1}


async def test_host_memory_smaller_than_an_adapter_names_the_setting_each_time(tmp_path: Path) -> None:
    """At once, on every call, and with what fits going on."""
    async with running(tmp_path, host_bytes=4096) as bench:
        large = bench.add("large", rank=16)
        bench.add("small")

        async def serve() -> None:
            await bench.loader.prepare("default/large")
            await bench.loader.acquire(large.digest)

        for _ in range(2):
            with pytest.raises(AdapterMemory, match="--host-memory") as caught:
                await asyncio.wait_for(serve(), 60)
            assert caught.value.retry_after is None
        assert (await bench.loader.prepare("default/small")).rank == 4


@pytest.mark.parametrize("is_told", [True, False])
async def test_what_is_larger_than_tiers_is_refused_by_all_of_them_before_anything_is_fetched(
    tmp_path: Path, is_told: bool
) -> None:
    """By name; once its files are here if the registry does not tell how large it is packed."""
    async with running(tmp_path, host_bytes=4096, device_bytes=4096) as bench:
        large = bench.add("large", rank=16)
        nbytes = 2 * 4 * 16 * (32 + 32 + 32 + 16)
        told = PackedSize(nbytes // 2) if is_told else PackedSize()
        bench.known["large"] = large._replace(packed=told)
        for _ in range(2):
            with pytest.raises(AdapterMemory) as caught:
                await bench.loader.prepare("default/large")
            assert caught.value.metadata == {"version": large.name, "tier": "host,device"}
            wanted = (large.name, f"{nbytes} bytes", "--host-memory, now 4096", "--adapter-memory, now 4096")
            assert all(text in caught.value.message for text in wanted)
            with pytest.raises(AdapterMemory, match="--adapter-memory"):
                await bench.loader.acquire(large.digest)
        assert bench.cache.has(large.digest) == (not is_told)
        assert bench.loader.stats().failures == {"ADAPTER_MEMORY": 4}


async def test_a_blend_whose_files_are_too_large_together_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        parts = [bench.add(name, rank=16) for name in ("one", "three")]
        for part in parts:  # each has room
            padded = tuple(file._replace(size=(1 << 19) + 1) for file in part.files if file.path == WEIGHTS)
            bench.known[part.name.split("/")[3]] = part._replace(files=padded)
        with pytest.raises(AdapterMemory, match="--disk-bytes, now 1048576") as caught:
            await bench.loader.prepare_blend([BlendPart(f"default/{name}", 1.0) for name in ("one", "three")])
        assert all(part.name in caught.value.message for part in parts)


async def test_text_files_are_told_and_read_wherever_they_are_now(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.add("talks")
        folder = tmp_path / "root" / "talks"
        files = {"chat_template.jinja": b"{{ x }}", "tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        prepared = await bench.loader.prepare("default/talks")
        assert sorted(file.path for file in prepared.texts) == sorted(files)
        assert await bench.loader.read_texts(prepared.digest) == files
        cached = next((tmp_path / "cache" / "sha256").iterdir())
        flip_a_bit(cached / "tokenizer.json")
        assert await bench.loader.read_texts(prepared.digest) == files  # fetched again
        assert bench.cache.evict(1)
        assert await bench.loader.read_texts(prepared.digest) == files
        bench.cache.evict(1)
        flip_a_bit(folder / "chat_template.jinja")
        with pytest.raises(DigestMismatch) as caught:
            await bench.loader.read_texts(prepared.digest)
        assert caught.value.metadata["file"] == "chat_template.jinja"


async def test_nothing_is_prepared_for_another_base_model_than_the_registry_s(tmp_path: Path) -> None:
    """Neither what is new here nor what was staged before; an operator can still unload that."""
    async with running(tmp_path) as bench:
        known, new = bench.add("known"), bench.add("new")
        await bench.loader.prepare("default/known")
        bench.base_model_conflict = BaseModelConflict("another tiny", metadata={"base_model": "baseModels/tiny"})
        for asked in (
            bench.loader.prepare("default/known"),
            bench.loader.prepare("default/new"),
            bench.loader.prepare_blend([BlendPart("default/known", 0.5), BlendPart("default/new", 0.5)]),
            bench.loader.acquire(known.digest),
        ):
            with pytest.raises(BaseModelConflict, match="another tiny") as caught:
                await asked
            assert caught.value.metadata == {"base_model": "baseModels/tiny"}
        assert not bench.cache.has(new.digest)
        stats = bench.loader.stats()
        assert (stats.base_model_conflict, stats.failures) == ("another tiny", {"BASE_MODEL_CONFLICT": 4})
        assert await bench.loader.resolve("default/known") == known.digest
        bench.base_model_conflict = None
        for name, version in (("known", known), ("new", new)):
            assert (await bench.loader.prepare(f"default/{name}")).digest == version.digest
        assert bench.loader.stats().base_model_conflict == ""
