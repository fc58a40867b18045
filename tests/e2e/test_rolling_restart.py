"""Replicas that are restarted one after the other under load: nothing that was accepted is lost or cut."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from examples.stack import REGISTRY_SERVICE, ServerProcess, free_address, register, wait_for_base_model
from loraplex import Client
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from registry_service import migrations
from shared.errors import Draining, Unavailable
from shared.status import from_rpc_error
from tests.e2e.replicas import RECONNECTED_SECONDS, balanced_channel, client_of
from tests.e2e.tiny_stack import BASE, TinyWorld, register_content
from tests.e2e.traffic import PATIENCE_SECONDS, Traffic, ask, long_streams
from tests.registry_service.embedded_postgres import embedded_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
TOLERATED = {"DRAINING", "UNAVAILABLE"}  # of what was not accepted: sent to a replica that had just begun to drain


async def test_inference_replicas(world: TinyWorld, tmp_path: Path) -> None:
    async with AsyncExitStack() as parts:
        stack, _ = await parts.enter_async_context(world.serving(tmp_path, names=["content-0", "content-1"]))
        second = stack.another_replica(free_address("127.0.0.2"), "second")
        parts.push_async_callback(second.stop)
        await second.start()
        await second.ready(120)
        replicas = [stack.inference, second]
        client = client_of(stack, *(replica.address for replica in replicas))
        parts.push_async_callback(client.close)
        for _ in range(2 * len(RESIDENT)):  # each replica has answered for each adapter
            await asyncio.gather(*(ask(client, 0, name) for name in RESIDENT))
        async with Traffic(world, client, RESIDENT, lines=6, tolerated=TOLERATED) as traffic:
            for replica in replicas:
                streams = await long_streams(client, 2 * list(RESIDENT))  # on both
                stopping = time.monotonic()
                assert await replica.stop() == 0
                seconds = time.monotonic() - stopping
                await asyncio.gather(*(stream.check(world) for stream in streams))
                await traffic.answers(20)
                await replica.start()
                await replica.ready(120)
                await asyncio.sleep(RECONNECTED_SECONDS)
                await traffic.answers(20)
                print(f"{replica.address} drained in {seconds:.2f} s and was back {time.monotonic() - stopping:.1f} s")
        assert traffic.truncated == 0
    assert second.process is not None
    assert second.process.returncode == 0


class Watcher:
    """A watch over all registries that is resumed wherever it ends. `endings`: with what; `seen`: of which adapters."""

    def __init__(self, stub: registry_pb2_grpc.AdapterRegistryServiceStub) -> None:
        self.seen: list[str] = []
        self.revisions: list[int] = []
        self.endings: Counter[str] = Counter()
        self._stub = stub
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        request = registry_pb2.WatchAdaptersRequest(parent="namespaces/-")
        while True:
            try:
                async for response in self._stub.WatchAdapters(request, wait_for_ready=True):
                    request.resume_token = response.resume_token or request.resume_token
                    self.seen += [change.adapter.name.rpartition("/")[2] for change in response.changes]
                    self.revisions += [change.revision for change in response.changes]
            except grpc.aio.AioRpcError as error:
                self.endings[from_rpc_error(error).reason] += 1

    async def until_seen(self, name: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while name not in self.seen:  # noqa: ASYNC110 - it comes from another process
                await asyncio.sleep(0.01)


class Callers:
    """Resolves and registrations without end, each repeated until it is answered, and what came of them."""

    def __init__(self, client: Client) -> None:
        self.num_resolved = 0
        self.registered: list[str] = []
        self.refused: Counter[str] = Counter()
        self._client = client
        self._is_over = False

    async def __aenter__(self) -> "Callers":
        self._tasks = [asyncio.create_task(self._resolve()) for _ in range(6)]
        self._tasks.append(asyncio.create_task(self._register()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def more(self, resolved: int, registered: int) -> None:
        """Returns when there are that many more of each."""
        num_resolved, num_registered = self.num_resolved + resolved, len(self.registered) + registered
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.num_resolved < num_resolved or len(self.registered) < num_registered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _resolve(self) -> None:
        request = registry_pb2.ResolveAdapterRequest(reference="first", base_model=BASE)
        while not self._is_over:
            try:
                answer = await self._client.call(self._client.registry.ResolveAdapter(request, timeout=10))
            except Unavailable as error:
                self.refused[error.reason] += 1
            else:
                assert answer.version.name.endswith("/versions/1")
                self.num_resolved += 1

    async def _register(self) -> None:
        while not self._is_over:
            name, request_id = f"more-{len(self.registered)}", str(uuid.uuid4())
            while True:
                try:
                    await register(self._client, name, "file://store/content-1", BASE, request_id=request_id)
                    break
                except Unavailable as error:
                    self.refused[error.reason] += 1
            self.registered.append(name)


async def _two_registries(world: TinyWorld, run: Path, database: str) -> AsyncIterator[list[ServerProcess]]:
    stack = world.stack(run, database=database)
    registries = [stack.registry, stack.another_registry(free_address("127.0.0.2"), "registry-2")]
    for registry in registries:
        await registry.start()
        await registry.ready(60)
    yield registries
    for registry in registries:
        assert await registry.stop() == 0


async def test_registries_on_postgres(world: TinyWorld, tmp_path: Path) -> None:
    with embedded_postgres() as postgres:
        database = postgres.create_database("rolling")
        await asyncio.to_thread(migrations.upgrade, database)
        async for registries in _two_registries(world, tmp_path / "run", database):
            await _roll(world, registries)


async def _roll(world: TinyWorld, registries: list[ServerProcess]) -> None:
    channel = balanced_channel([registry.address for registry in registries], REGISTRY_SERVICE)
    async with Client(registry=registries[0].address) as client, channel:
        client.registry = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
        config = (world.folder / "base" / "config.json").read_text()
        base_model = registry_pb2.RegisterBaseModelRequest(id=BASE, config_json=config)
        await client.call(client.registry.RegisterBaseModel(base_model, wait_for_ready=True))
        await wait_for_base_model(client, BASE)
        await register_content(client, "first", "content-0")
        watchers = [Watcher(client.registry) for _ in range(4)]
        async with Callers(client) as callers:
            for registry in registries:
                await callers.more(100, 5)
                stopping = time.monotonic()
                assert await registry.stop() == 0
                seconds = time.monotonic() - stopping
                await callers.more(100, 5)
                await registry.start()
                await registry.ready(60)
                await asyncio.sleep(RECONNECTED_SECONDS)
                await callers.more(100, 5)
                print(f"{registry.address} drained in {seconds:.2f} s, back {time.monotonic() - stopping:.1f} s")
        for watcher in watchers:
            await watcher.until_seen(callers.registered[-1])
            watcher.task.cancel()
            assert watcher.revisions == sorted(set(watcher.revisions)), "a change came twice or out of order"
            assert {"first", *callers.registered} <= set(watcher.seen)
            assert watcher.endings.total() >= 1, "it was at no registry that ended"
        endings = sum((watcher.endings for watcher in watchers), Counter[str]())
        assert set(endings) <= {Draining.reason, Unavailable.reason}
        print(
            f"{callers.num_resolved} resolves, {len(callers.registered)} registrations, {dict(callers.refused)} refused"
        )
        print(f"watches ended with {dict(endings)} and missed nothing")
