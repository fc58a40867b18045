"""The adapter process as it really runs: a subprocess, its sockets, a registry and files that go wrong."""

import asyncio
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from inference_service.adapters.client import AdapterClient
from inference_service.adapters.config import AdapterProcessConfig, AdapterProcessStart
from inference_service.adapters.host_arena import create_host_arena, map_host_arena
from inference_service.adapters.staging import PER_TENANT
from inference_service.stats import Usage
from inference_service.types import (
    Acquire,
    Acquired,
    AcquireFailed,
    AdapterResponse,
    BlendPart,
    EngineStarted,
    PreparedAdapter,
    Release,
    decode_adapter_response,
    encode,
)
from shared.adapter_format.files import WEIGHTS
from shared.base_model import linear_shape, module_path
from shared.errors import (
    AdapterInvalid,
    AdapterMemory,
    AdapterNotFound,
    BaseModelConflict,
    CredentialNotAllowed,
    DigestMismatch,
    RegistryUnavailable,
    SourceNotFound,
    SourceUnavailable,
)
from shared.sources.credentials import Credential
from shared.sources.resolver import PinnedSource
from tests.inference_service.adapters.fake_registry import FakeRegistry
from tests.inference_service.adapters.small_adapters import (
    BASE_MODEL,
    MODEL,
    RAW_CONFIG,
    flip_a_bit,
    version_of,
    write_adapter,
)
from tests.shared.sources.fault_proxy import Fault

ARENA_BYTES = 64 << 10
WEIGHTS_ONE, WEIGHTS_TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64
ROOT = Path(__file__).parents[3]


class _Engine:
    """The engine's end of the conversation."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, b"engine")
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    async def send(self, message: msgspec.Struct) -> None:
        await self.socket.send(encode(message))

    async def receive(self, seconds: float = 60) -> AdapterResponse:
        async with asyncio.timeout(seconds):
            return decode_adapter_response(await self.socket.recv())

    async def acquire(self, digest: str) -> Acquired | AcquireFailed:
        await self.send(Acquire(digest))
        answer = await self.receive()
        assert isinstance(answer, Acquired | AcquireFailed)
        return answer


class _Replica:
    """One adapter process and those who talk to it."""

    def __init__(self, folder: Path, registry: FakeRegistry, address: str, **config: Any) -> None:
        self.folder, self.address = folder, address
        self.arena_fd = create_host_arena(config.pop("host_bytes", ARENA_BYTES))
        self.arena = map_host_arena(self.arena_fd)
        self.config = AdapterProcessConfig(
            registry=f"127.0.0.1:{registry.port}", base_model="tiny", model_folder=str(folder / "model"),
            dtype="float32", cache_dir=str(folder / "cache"), disk_bytes=1 << 20,
            file_roots={"root": str(folder / "root")}, **config,
        )  # fmt: skip
        self.start_process()
        self.client = AdapterClient.start(address, "api-0")
        self.engine = _Engine(address)

    def start_process(self, *, wait_for_engine: bool = False) -> None:
        start = AdapterProcessStart(self.config, self.address, self.arena_fd, wait_for_engine)
        self.log = (self.folder / "log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inference_service.adapters.process"],
            stdin=subprocess.PIPE,
            stderr=self.log,
            pass_fds=[self.arena_fd],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.folder / "plugins")])},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(start) + b"\n")
        self.process.stdin.flush()

    def end_process(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        status = self.process.wait(60)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.log.close()
        return status

    @property
    def log_text(self) -> str:
        return (self.folder / "log").read_text()

    def staged_count(self, name: str) -> int:
        return self.log_text.count(f'"message": "staged namespaces/default/adapters/{name}/')

    async def close(self) -> None:
        await self.client.close()
        self.engine.socket.close()
        if not self.log.closed:
            self.end_process()
        os.close(self.arena_fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, a root of adapters, and the entry point of file:// sources, installed or not."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(RAW_CONFIG))
    (tmp_path / "root").mkdir()
    info = tmp_path / "plugins" / "sources-0.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text("[loraplex.resolvers]\nfile = shared.sources.file:FileSource\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sources\nVersion: 0\n")
    return tmp_path


@pytest.fixture
def address() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="lp")  # short: an ipc path has at most 107 bytes
    yield f"ipc://{folder}/a"
    shutil.rmtree(folder)


@pytest.fixture
async def replica(folder: Path, registry: FakeRegistry, address: str) -> AsyncIterator[_Replica]:
    async with _running(folder, registry, address) as replica:
        yield replica


@asynccontextmanager
async def _running(folder: Path, registry: FakeRegistry, address: str, **config: Any) -> AsyncIterator[_Replica]:
    replica = _Replica(folder, registry, address, **config)
    try:
        async with asyncio.timeout(60):
            yield replica
    finally:
        await replica.close()


def _add(replica_folder: Path, registry: FakeRegistry, name: str, **adapter: Any) -> str:
    write_adapter(replica_folder / "root" / name, **adapter)
    version = version_of(replica_folder / "root" / name, name)
    registry.add(f"default/{name}", version)
    return version.digest


async def test_from_a_reference_to_a_blob_that_the_engine_reads(registry: FakeRegistry, replica: _Replica) -> None:
    tensors = write_adapter(replica.folder / "root" / "a", modules=(0, 3))
    version = version_of(replica.folder / "root" / "a")
    registry.add("default/a", version)
    prepared = await replica.client.prepare("default/a")
    assert (prepared.version, prepared.digest, prepared.rank) == (version.name, version.digest, 4)
    acquired = await replica.engine.acquire(version.digest)
    assert isinstance(acquired, Acquired)
    assert acquired.layout.nbytes == prepared.size_bytes
    with mmap.mmap(replica.arena_fd, 0, prot=mmap.PROT_READ) as arena:
        for chunk in acquired.layout.chunks:
            for module in chunk.modules:
                out, columns = linear_shape(MODEL, module.module)
                name = f"base_model.model.{module_path(chunk.layer, module.module)}"
                start = acquired.host_offset + chunk.offset
                a = np.frombuffer(arena, np.float32, 4 * columns, start + module.a_offset).reshape(4, columns)
                b = np.frombuffer(arena, np.float32, 4 * out, start + module.b_offset).reshape(4, out)
                assert np.array_equal(a, tensors[f"{name}.lora_A.weight"])
                assert np.array_equal(b, tensors[f"{name}.lora_B.weight"].T)
                del a, b
    (staged,) = await replica.client.list_staged()
    assert (staged.version, staged.digest, staged.level, staged.rank) == (version.name, version.digest, "HOST", 4)
    await replica.engine.send(Release(version.digest))
    await replica.client.drop(version.digest)
    (staged,) = await replica.client.list_staged()
    assert (staged.level, staged.size_bytes) == ("DISK", sum(file.size for file in version.files))
    assert isinstance(await replica.engine.acquire(version.digest), Acquired)
    assert registry.base_models[0].id == "tiny"
    assert registry.base_models[0].fingerprint == BASE_MODEL.fingerprint
    assert replica.end_process() == 0
    assert list((replica.folder / "cache" / "work").iterdir()) == []


async def test_with_the_weights_of_another_model_no_adapter_is_prepared(
    folder: Path, registry: FakeRegistry, address: str
) -> None:
    """Not even one that a process before this one prepared, and not after the registry has gone away."""
    _add(folder, registry, "a")
    async with _running(folder, registry, address, weights_fingerprint=WEIGHTS_ONE) as replica:
        await replica.client.prepare("default/a")
        assert replica.end_process() == 0
    error = BaseModelConflict(f"tiny is registered with weights_fingerprint {WEIGHTS_ONE}, not {WEIGHTS_TWO}")
    registry.base_model_error = error
    async with _running(folder, registry, address, weights_fingerprint=WEIGHTS_TWO) as replica:
        blend = replica.client.prepare_blend([BlendPart("default/a", 1.0), BlendPart("default/b", 1.0)])
        for asked in (replica.client.prepare("default/a"), blend):
            with pytest.raises(BaseModelConflict, match=f"{WEIGHTS_ONE}, not {WEIGHTS_TWO}.*--model-name"):
                await asked
        assert error.message in (await replica.client.stats()).base_model_conflict
        assert "BASE_MODEL_CONFLICT: " in replica.log_text
    await registry.stop()
    async with _running(folder, registry, address, weights_fingerprint=WEIGHTS_TWO) as replica:
        with pytest.raises(RegistryUnavailable):
            await replica.client.prepare("default/a")
    async with _running(folder, registry, address, weights_fingerprint=WEIGHTS_ONE) as replica:
        assert (await replica.client.prepare("default/a")).tier == "disk"
    await registry.start()


async def test_resolve_fetches_nothing_and_drop_says_what_it_frees(registry: FakeRegistry, replica: _Replica) -> None:
    digest = _add(replica.folder, registry, "a")
    registry.add("default/a@1", version_of(replica.folder / "root" / "a"), ttl=0.01)
    assert await replica.client.resolve("default/a") == digest
    assert await replica.client.list_staged() == []
    assert await replica.client.drop(digest) == 0
    assert list((replica.folder / "cache" / "sha256").iterdir()) == []
    prepared = await replica.client.prepare("default/a@1")
    assert await replica.client.drop(digest) == prepared.size_bytes > 0
    assert await replica.client.drop(digest) == 0
    with pytest.raises(AdapterNotFound):
        await replica.client.resolve("default/b")


async def test_resolve_has_no_adapter_looked_for_and_does_not_keep_others_from_it(
    registry: FakeRegistry, replica: _Replica
) -> None:
    with pytest.raises(AdapterNotFound):
        await replica.client.resolve("default/a")
    assert registry.num_registered_only == registry.calls["default/a"] == 1
    digest = _add(replica.folder, registry, "a")  # as the registry does once it is asked to
    assert (await replica.client.prepare("default/a")).digest == digest
    assert (registry.num_registered_only, registry.calls["default/a"]) == (1, 2)


async def test_a_version_that_is_deleted_at_the_registry_keeps_its_meaning_here(
    registry: FakeRegistry, replica: _Replica
) -> None:
    digest = _add(replica.folder, registry, "a")
    await replica.client.prepare("default/a")
    registry.answers.clear()
    assert await replica.client.resolve("default/a@1") == digest
    assert await replica.client.resolve(f"default/a@{digest}") == digest
    for reference in ("default/a@2", "default/b@1", f"default/b@{digest}", "other/a@1", "default/a@prod"):
        with pytest.raises(AdapterNotFound):
            await replica.client.resolve(reference)


async def test_two_references_to_one_digest_are_one_fetch(registry: FakeRegistry, replica: _Replica) -> None:
    digest = _add(replica.folder, registry, "a")
    registry.add("default/b@prod", version_of(replica.folder / "root" / "a", "b"), alias="prod")
    references = ["default/a", "default/b@prod"] * 4
    found = await asyncio.gather(*(replica.client.prepare(reference) for reference in references))
    assert {adapter.digest for adapter in found} == {digest}
    assert {adapter.version.split("/")[3] for adapter in found} == {"a", "b"}
    assert registry.calls == {"default/a": 1, "default/b@prod": 1}
    assert replica.staged_count("a") + replica.staged_count("b") == 1
    assert {(s.version.split("/")[3], s.level) for s in await replica.client.list_staged()} == {
        ("a", "HOST"),
        ("b", "HOST"),
    }


async def test_a_bad_adapter_fails_only_those_who_ask_for_it(registry: FakeRegistry, replica: _Replica) -> None:
    _add(replica.folder, registry, "good")
    _add(replica.folder, registry, "flipped", seed=1)
    flip_a_bit(replica.folder / "root" / "flipped" / WEIGHTS)
    _add(replica.folder, registry, "cut", seed=2)
    os.truncate(replica.folder / "root" / "cut" / WEIGHTS, 100)
    _add(replica.folder, registry, "gone", seed=3)
    shutil.rmtree(replica.folder / "root" / "gone")
    _add(replica.folder, registry, "nan", seed=4, scale=np.nan)
    names = ["good", "flipped", "cut", "gone", "nan", "unknown"]
    found = await asyncio.gather(*(replica.client.prepare(f"default/{n}") for n in names), return_exceptions=True)
    expected = [DigestMismatch, DigestMismatch, SourceNotFound, AdapterInvalid, AdapterNotFound]
    assert [type(error) for error in found[1:]] == expected
    first, again = found[0], await replica.client.prepare("default/good")
    assert isinstance(first, PreparedAdapter)
    assert (first.tier, again.tier) == ("source", "host")
    assert again == msgspec.structs.replace(first, tier="host")
    with pytest.raises(DigestMismatch):  # remembered, then tried again
        await replica.client.prepare("default/flipped")
    flip_a_bit(replica.folder / "root" / "flipped" / WEIGHTS)
    await _eventually_prepares(replica, "default/flipped")


async def _eventually_prepares(replica: _Replica, reference: str) -> None:
    while True:
        with suppress(DigestMismatch, RegistryUnavailable, SourceNotFound):
            await replica.client.prepare(reference)
            return
        await asyncio.sleep(0.2)


async def test_what_was_damaged_in_the_cache_is_fetched_again(registry: FakeRegistry, replica: _Replica) -> None:
    digest = _add(replica.folder, registry, "a")
    await replica.client.prepare("default/a")
    cached = replica.folder / "cache" / "sha256" / digest.removeprefix("sha256:") / WEIGHTS
    for damage in (flip_a_bit, Path.unlink, lambda path: os.truncate(path, 10)):
        damage(cached)
        await replica.client.drop(digest)
        assert isinstance(await replica.engine.acquire(digest), Acquired)
        await replica.engine.send(Release(digest))
    flip_a_bit(cached)
    shutil.rmtree(replica.folder / "root" / "a")
    await replica.client.drop(digest)
    failed = await replica.engine.acquire(digest)
    assert isinstance(failed, AcquireFailed)
    assert failed.error.reason == "SOURCE_NOT_FOUND"


async def test_a_restart_finds_the_disk_tier_and_verifies_it(registry: FakeRegistry, replica: _Replica) -> None:
    digest = _add(replica.folder, registry, "a")
    await replica.client.prepare("default/a")
    cached = replica.folder / "cache" / "sha256" / digest.removeprefix("sha256:") / WEIGHTS
    replica.end_process(signal.SIGKILL)
    replica.start_process()
    (staged,) = await replica.client.list_staged()
    name = "namespaces/default/adapters/a/versions/1"
    assert (staged.version, staged.digest, staged.level, staged.rank) == (name, digest, "DISK", 4)
    # A request that was prepared before goes on, whether or not the registry can be asked.
    assert isinstance(await replica.engine.acquire(digest), Acquired)
    (staged,) = await replica.client.list_staged()
    assert (staged.version, staged.level, staged.rank) == (name, "HOST", 4)
    replica.end_process(signal.SIGKILL)
    flip_a_bit(cached)
    cached.parent.rename(replica.folder / "aside")
    replica.start_process()
    unknown = "sha256:" + "00" * 32
    found = await replica.client.list_staged([digest, unknown])
    assert [(s.version, s.digest, s.level, s.rank) for s in found] == [
        (name, digest, "KNOWN", 4),
        ("", unknown, "KNOWN", 0),
    ]
    (replica.folder / "aside").rename(cached.parent)
    failed = await replica.engine.acquire(digest)
    assert isinstance(failed, AcquireFailed)
    assert (failed.error.reason, failed.error.retry_after) == ("SOURCE_UNAVAILABLE", 1.0)
    await replica.client.prepare("default/a")
    assert "fetching it again" in replica.log_text
    assert isinstance(await replica.engine.acquire(digest), Acquired)


async def test_a_replaced_process_writes_nothing_before_the_engine_has_spoken(
    registry: FakeRegistry, replica: _Replica
) -> None:
    digest = _add(replica.folder, registry, "a")
    other = _add(replica.folder, registry, "b", seed=1)
    await replica.client.prepare("default/a")
    assert isinstance(await replica.engine.acquire(digest), Acquired)
    before = bytes(replica.arena)
    replica.end_process(signal.SIGKILL)
    replica.start_process(wait_for_engine=True)
    waiting = asyncio.create_task(replica.client.prepare("default/b"))
    await replica.client.list_staged()
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert bytes(replica.arena) == before
    await replica.engine.send(EngineStarted())
    assert (await waiting).digest == other


async def test_registry_down_at_the_start_in_the_middle_and_back(
    folder: Path, registry: FakeRegistry, address: str
) -> None:
    _add(folder, registry, "a")
    _add(folder, registry, "b", seed=1)
    registry.add("default/a", version_of(folder / "root" / "a"), ttl=0.01)
    await registry.stop()
    async with _running(folder, registry, address) as replica:
        with pytest.raises(RegistryUnavailable):
            await replica.client.prepare("default/a")
        await registry.start()
        await _eventually_prepares(replica, "default/a")
        await registry.stop()
        for _ in range(3):
            assert (await replica.client.prepare("default/a")).rank == 4
        with pytest.raises(RegistryUnavailable):
            await replica.client.prepare("default/b")
        await registry.start()
        await _eventually_prepares(replica, "default/b")


async def test_a_process_that_starts_while_the_registry_is_away_knows_what_the_one_before_was_told(
    folder: Path, registry: FakeRegistry, address: str
) -> None:
    digest = _add(folder, registry, "a")
    _add(folder, registry, "b", seed=1)
    async with _running(folder, registry, address) as replica:
        await replica.client.prepare("default/a")
        await registry.stop()
        replica.end_process(signal.SIGKILL)
        replica.start_process(wait_for_engine=True)
        await replica.engine.send(EngineStarted())
        assert (await replica.client.prepare("default/a")).digest == digest
        assert isinstance(await replica.engine.acquire(digest), Acquired)
        with pytest.raises(RegistryUnavailable):
            await replica.client.prepare("default/b")
        newer = _add(folder, registry, "a2", seed=2)
        registry.add("default/a", version_of(folder / "root" / "a2", "a", number=2))
        await registry.start()
        await _eventually_prepares(replica, "default/b")
        async with asyncio.timeout(60):
            while (await replica.client.prepare("default/a")).digest != newer:  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.1)


async def test_host_memory_smaller_than_an_adapter_and_full_of_those_in_use(
    folder: Path, registry: FakeRegistry, address: str
) -> None:
    small = _add(folder, registry, "small")  # 2 layers × 4 × (32 + 32 + 32 + 16) floats
    other = _add(folder, registry, "other", seed=1)
    _add(folder, registry, "big", rank=16)
    async with _running(folder, registry, address, host_bytes=4096) as replica:
        with pytest.raises(AdapterMemory, match="--host-memory") as caught:
            await replica.client.prepare("default/big")
        assert caught.value.retry_after is None
        await replica.client.prepare("default/small")
        assert isinstance(await replica.engine.acquire(small), Acquired)
        prepared = await replica.client.prepare("default/other")  # its files are here; the engine may hold it
        assert prepared.digest == other
        failed = await replica.engine.acquire(other)
        assert isinstance(failed, AcquireFailed)
        assert (failed.error.reason, failed.error.retry_after) == ("ADAPTER_MEMORY", 0.5)
        await replica.engine.send(Acquire(other))
        await asyncio.sleep(0.1)
        await replica.engine.send(Release(small))  # an acquire waits a while for room
        answer = await replica.engine.receive()
        assert isinstance(answer, Acquired)
        assert answer.digest == other


async def test_references_of_a_dead_engine_are_dropped(folder: Path, registry: FakeRegistry, address: str) -> None:
    first = _add(folder, registry, "a")
    second = _add(folder, registry, "b", seed=1)
    async with _running(folder, registry, address, host_bytes=4096) as replica:
        await replica.client.prepare("default/a")
        assert isinstance(await replica.engine.acquire(first), Acquired)
        await replica.client.prepare("default/b")
        await replica.engine.send(Acquire(second))
        replica.engine.socket.close()
        replica.engine = _Engine(address)
        await replica.engine.send(EngineStarted())
        answer = await replica.engine.acquire(second)
        assert isinstance(answer, Acquired)


async def test_malformed_messages_and_vanished_peers_disturb_nobody(registry: FakeRegistry, replica: _Replica) -> None:
    _add(replica.folder, registry, "a")
    registry.delay = 0.2
    await replica.engine.socket.send(b"\xc1rubbish")
    await replica.engine.socket.send_multipart([b"", b""])
    await replica.engine.send(Release("sha256:unknown"))
    await replica.engine.send(Acquire("sha256:unknown"))
    gone = AdapterClient.start(replica.address, "api-1")
    call = asyncio.create_task(gone.prepare("default/a"))
    await asyncio.sleep(0.1)
    call.cancel()
    await gone.close()
    assert (await replica.client.prepare("default/a")).rank == 4
    answer = await replica.engine.receive()
    assert isinstance(answer, AcquireFailed)
    assert "malformed" in replica.log_text


async def test_the_client_asks_the_next_process_once_for_what_the_dead_one_owed(
    registry: FakeRegistry, replica: _Replica
) -> None:
    _add(replica.folder, registry, "a")
    registry.delay = 30
    fatal = asyncio.create_task(replica.client.prepare("default/a"))
    await asyncio.sleep(0.1)
    replica.end_process(signal.SIGKILL)
    replica.client.adapters_down()
    replica.start_process()
    later = asyncio.create_task(replica.client.prepare("default/a"))
    await replica.client.list_staged()
    replica.end_process(signal.SIGKILL)
    replica.client.adapters_down()
    with pytest.raises(SourceUnavailable):
        await fatal
    registry.delay = 0
    replica.start_process()
    assert (await later).rank == 4


async def test_it_ends_with_its_parent_and_not_with_sigint(registry: FakeRegistry, replica: _Replica) -> None:
    await replica.client.list_staged()
    replica.process.send_signal(signal.SIGINT)
    await replica.client.list_staged()
    assert replica.process.stdin is not None
    replica.process.stdin.close()
    assert await asyncio.to_thread(replica.process.wait, 60) == 0


async def test_what_it_cannot_start_with_is_said(folder: Path, registry: FakeRegistry, address: str) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    async with _running(folder, registry, address) as replica:
        assert await asyncio.to_thread(replica.process.wait, 60) == 2
        assert "MambaForCausalLM" in replica.log_text


async def test_it_says_what_it_holds_what_it_loads_and_what_failed(registry: FakeRegistry, replica: _Replica) -> None:
    empty = await replica.client.stats()
    assert (empty.host, empty.disk) == (Usage(0, ARENA_BYTES), Usage(0, 1 << 20))
    digest = _add(replica.folder, registry, "a")
    files_bytes = sum(path.stat().st_size for path in (replica.folder / "root" / "a").iterdir())
    prepared = await replica.client.prepare("default/a")
    await replica.engine.acquire(digest)
    with pytest.raises(AdapterNotFound):
        await replica.client.prepare("default/nobody")
    _add(replica.folder, registry, "flipped", seed=1)
    flip_a_bit(replica.folder / "root" / "flipped" / WEIGHTS)
    with pytest.raises(DigestMismatch):
        await replica.client.prepare("default/flipped")
    stats = await replica.client.stats()
    assert (stats.host.used, stats.host_adapters) == (prepared.size_bytes, 1)
    assert stats.host_held_bytes == stats.host.used
    assert (stats.disk.used, stats.disk_adapters) == (files_bytes, 1)
    assert stats.failures == {"ADAPTER_NOT_FOUND": 1, "DIGEST_MISMATCH": 1}
    assert {phase: seconds.count for phase, seconds in stats.load_seconds.items()} == {
        "resolve": 2, "fetch": 1, "pack": 1,
    }  # fmt: skip
    assert all(sum(seconds.buckets) == seconds.count for seconds in stats.load_seconds.values())
    assert (stats.loads_in_flight, stats.evictions) == ([], {"host": 0, "disk": 0})
    assert stats.fetched_bytes == files_bytes
    names = await replica.client.names([digest, "sha256:unknown"])
    assert names == {digest: [prepared.version], "sha256:unknown": [""]}


async def test_an_adapter_that_left_host_memory_is_read_again_when_the_engine_wants_it(
    folder: Path, registry: FakeRegistry, address: str
) -> None:
    """A request for what is on the device does not read files: only the engine knows whether it needs the blob."""
    digest = _add(folder, registry, "a")
    _add(folder, registry, "b", seed=1)
    async with _running(folder, registry, address, host_bytes=4096) as replica:
        first = await replica.client.prepare("default/a")
        await replica.client.prepare("default/b")  # takes the place of a
        again = await replica.client.prepare("default/a")
        assert (first.tier, again.tier) == ("source", "disk")
        assert again == msgspec.structs.replace(first, tier="disk")
        assert replica.staged_count("a") == 1
        assert isinstance(await replica.engine.acquire(digest), Acquired)
        assert replica.staged_count("a") == 2
        assert (await replica.client.stats()).evictions == {"host": 2, "disk": 0}


async def test_a_private_repository_with_a_credential(
    folder: Path, registry: FakeRegistry, address: str, hub: Any
) -> None:
    write_adapter(folder / "root" / "a")
    uri = hub.put("a", {path.name: path.read_bytes() for path in (folder / "root" / "a").iterdir()})
    hub.hub.repos["org/a"].is_private = True
    pinned = PinnedSource(uri, hub.hub.repos["org/a"].refs["main"], credential_ref="hub")
    registry.add("default/a", version_of(folder / "root" / "a")._replace(sources=(pinned,)))
    registry.add(
        "default/b", version_of(folder / "root" / "a", "b")._replace(sources=(pinned._replace(uri="hf://x/y"),))
    )
    credential = Credential("hf", "value:hf_goodtoken", ("default",), ("hf://org/",), endpoint=hub.proxy.url)
    async with _running(folder, registry, address, credentials={"hub": credential}, log_level="debug") as replica:
        with pytest.raises(CredentialNotAllowed):
            await replica.client.prepare("default/b")
        assert (await replica.client.prepare("default/a")).rank == 4
        assert replica.end_process() == 0
        assert "hf_goodtoken" not in replica.log_text
        assert "SECRETSIGNATURE" not in replica.log_text


async def test_a_source_that_hangs_takes_no_thread_that_another_needs(
    folder: Path, registry: FakeRegistry, address: str, hub: Any
) -> None:
    _add(folder, registry, "local")
    files = {path.name: path.read_bytes() for path in (folder / "root" / "local").iterdir()}
    hub.put("a", files)
    hub.store.faults.append(Fault(after=100, ending="stall"))
    pinned = PinnedSource("hf://org/a", hub.hub.repos["org/a"].refs["main"], credential_ref="hub")
    for number in range(PER_TENANT + 8):
        write_adapter(folder / "other" / str(number), seed=number + 1)
        version = version_of(folder / "other" / str(number), f"hangs{number}")
        registry.add(f"default/hangs{number}", version._replace(sources=(pinned,)))
    credential = Credential("hf", "none", ("*",), ("hf://",), endpoint=hub.proxy.url)
    async with _running(folder, registry, address, credentials={"hub": credential}) as replica:
        names = [f"default/hangs{number}" for number in range(PER_TENANT + 8)]
        hanging = [asyncio.ensure_future(replica.client.prepare(name)) for name in names]
        await asyncio.sleep(1.5)
        async with asyncio.timeout(60):  # a read of theirs is given up after ten seconds
            assert (await replica.client.prepare("default/local")).rank == 4
        assert not any(each.done() for each in hanging)
        for each in hanging:
            each.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert replica.end_process() == 0
