"""Processes that are killed under load: the registry, the engine, the adapter process, an API process; and SIGTERM."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.stack import INFERENCE_SERVICE, Stack
from loraplex import Client
from loraplex.inference.v1 import control_pb2, inference_pb2_grpc
from loraplex.registry.v1 import registry_pb2
from tests.e2e.processes import kill, processes_of
from tests.e2e.streams import collect
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import PATIENCE_SECONDS, Traffic, ask, assert_is_of, at_last, long_streams, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
AWAY = {"ENGINE_UNAVAILABLE", "UNAVAILABLE"}  # the latter from the client's channel, once health says NOT_SERVING


class Replica(NamedTuple):
    """The running services and a client of them."""

    stack: Stack
    client: Client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    run = tmp_path_factory.mktemp("processes")
    async with world.serving(run, "--api-processes=2", names=["content-0", "content-1"]) as (stack, client):
        yield Replica(stack, client)


async def with_a_version_deleted(world: TinyWorld, client: Client, adapter: str) -> str:
    """Registers two versions and has the replica know them, deletes the first, and returns when the replica knows of
    a third: it has an answer for the name from before, so the watch has told of all until then. The content of the
    second."""
    deleted, kept, after = world.contents[8:11]
    for number, content in enumerate((deleted, kept), 1):
        await register_content(client, adapter, content)
        await ask(client, 0, f"{adapter}@{number}")
    await ask(client, 0, adapter)
    name = f"namespaces/default/adapters/{adapter}/versions/1"
    await client.call(client.registry.DeleteAdapterVersion(registry_pb2.DeleteAdapterVersionRequest(name=name)))
    await register_content(client, adapter, after)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            answer = await ask(client, 0, adapter, tokens=1)
            if answer.started is not None and answer.started.adapter_version.endswith("/3"):
                return kept


@pytest.mark.parametrize("seconds_down", [0, pytest.param(60, marks=pytest.mark.slow)])
async def test_without_its_registry_a_replica_serves_what_it_knows(
    world: TinyWorld, replica: Replica, seconds_down: int
) -> None:
    """A minute is more than the registry's answers are good for by themselves (`resolve_ttl_seconds`)."""
    stack, client = replica
    known, new = world.contents[5:7] if seconds_down else world.contents[2:4]
    await register_content(client, known, known)
    await ask(client, 0, known)
    await client.call(client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=known)))
    edited = f"edited-{seconds_down}"
    kept = await with_a_version_deleted(world, client, edited)
    assert stack.registry.process is not None
    async with Traffic(world, client, RESIDENT) as traffic:
        stack.registry.process.kill()
        await stack.registry.process.wait()
        started = time.monotonic()
        error = await refusal(ask(client, 0, "never-heard-of"))
        assert error.reason == "REGISTRY_UNAVAILABLE"
        assert error.retry_after is not None
        seconds_until_refused = time.monotonic() - started
        assert_is_of(world, known, 0, await ask(client, 0, known))  # not resident: loaded from the disk tier
        assert (await refusal(ask(client, 0, f"{edited}@1"))).reason == "REGISTRY_UNAVAILABLE"  # deleted
        assert_is_of(world, kept, 0, await ask(client, 0, f"{edited}@2"))
        await traffic.answers(20)
        await asyncio.sleep(max(0.0, seconds_down - (time.monotonic() - started)))
        await traffic.answers(8)
        await stack.registry.start()
        await stack.registry.ready(30)
        back = time.monotonic()
        await at_last(lambda: register_content(client, new, new), PATIENCE_SECONDS)
        answer, _ = await at_last(lambda: ask(client, 0, new), PATIENCE_SECONDS)
        assert_is_of(world, new, 0, answer)
        print(f"a new adapter answers {time.monotonic() - back:.2f} s after the registry is back;", end=" ")
        print(f"refused without it in {seconds_until_refused:.2f} s")
        await traffic.answers(8)


async def test_a_killed_engine_ends_its_streams_at_once_and_comes_back(world: TinyWorld, replica: Replica) -> None:
    stack, client = replica
    streams = await long_streams(client, RESIDENT)
    async with Traffic(world, client, RESIDENT, tolerated=AWAY) as traffic:
        (engine,) = processes_of(stack, "engine")
        killed = time.monotonic()
        kill(engine)
        errors = await asyncio.gather(*(refusal(stream.task) for stream in streams))
        seconds_until_told = time.monotonic() - killed
        for error in errors:
            assert error.reason == "ENGINE_UNAVAILABLE"
            assert error.retry_after is not None
        await traffic.answers(1)
        seconds_until_back = time.monotonic() - killed
        num_failed = traffic.failed.total()
        await traffic.answers(20)
        assert traffic.failed.total() == num_failed, "requests failed after the engine was back"
    print(f"streams ended after {1e3 * seconds_until_told:.0f} ms, answers again after {seconds_until_back:.2f} s")


@pytest.mark.slow
async def test_an_engine_that_gets_no_memory_ends_and_comes_back(world: TinyWorld, replica: Replica) -> None:
    """The kernel gives it no page more, so a step of a shape that was not there before fails, and libraries with it."""
    stack, client = replica
    (engine,) = processes_of(stack, "engine")
    prompt = [7] * 150
    async with Traffic(world, client, RESIDENT, tolerated=AWAY) as traffic:
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
        out_of_memory = time.monotonic()
        error = await refusal(collect(client, prompt, "content-0", stop={"max_tokens": 2}, timeout=PATIENCE_SECONDS))
        assert error.reason in AWAY
        await at_last(lambda: collect(client, prompt, "content-0", stop={"max_tokens": 2}), 60)
        seconds = time.monotonic() - out_of_memory
        num_failed = traffic.failed.total()
        await traffic.answers(20)
        assert traffic.failed.total() == num_failed, "requests failed after the engine was back"
    print(f"answers {seconds:.2f} s after there was no memory")


async def test_requests_do_not_notice_that_the_adapter_process_dies(world: TinyWorld, replica: Replica) -> None:
    stack, client = replica
    new = world.contents[4]
    await register_content(client, new, new)
    async with Traffic(world, client, RESIDENT, lines=6) as traffic:
        streams = await long_streams(client, RESIDENT)
        (adapters,) = processes_of(stack, "adapters")
        kill(adapters)
        killed = time.monotonic()
        assert_is_of(world, new, 0, await ask(client, 0, new))
        seconds = time.monotonic() - killed
        await asyncio.gather(*(stream.check(world) for stream in streams))
        await traffic.answers(20)
    print(f"a new adapter answers {seconds:.2f} s after the death")


@pytest.mark.slow
async def test_the_adapter_process_dies_while_the_registry_is_down(world: TinyWorld, replica: Replica) -> None:
    """Its successor reads from disk what names mean, so nobody notices but who asks for what was never asked for."""
    stack, client = replica
    assert stack.registry.process is not None
    async with Traffic(world, client, RESIDENT) as traffic:
        streams = await long_streams(client, RESIDENT)
        stack.registry.process.kill()
        await stack.registry.process.wait()
        (adapters,) = processes_of(stack, "adapters")
        kill(adapters)
        killed = time.monotonic()
        try:
            error = await refusal(ask(client, 0, "never-heard-of-either"))
            assert error.reason == "REGISTRY_UNAVAILABLE"
            assert error.retry_after is not None
            print(f"an unknown adapter is refused {time.monotonic() - killed:.2f} s after both deaths;", end=" ")
            await asyncio.gather(*(stream.check(world) for stream in streams))
            await traffic.answers(20)
        finally:
            await stack.registry.start()
            await stack.registry.ready(30)
        await traffic.answers(8)


async def test_a_killed_api_process_takes_only_its_own_streams(world: TinyWorld, replica: Replica) -> None:
    stack, _ = replica
    by_server = await connected_to_each(stack, 2)
    victim, survivor = by_server
    async with AsyncExitStack() as running:
        lost = [
            await running.enter_async_context(Traffic(world, client, RESIDENT, lines=1, tolerated={"UNAVAILABLE"}))
            for client in by_server[victim]
        ]
        kept = [
            await running.enter_async_context(Traffic(world, client, RESIDENT, lines=1))
            for client in by_server[survivor]
        ]
        streams = await long_streams(by_server[victim][0], RESIDENT)
        killed = time.monotonic()
        kill(victim)
        for error in await asyncio.gather(*(refusal(stream.task) for stream in streams)):
            assert error.reason == "UNAVAILABLE"
        seconds_until_told = time.monotonic() - killed
        await asyncio.gather(*(traffic.answers(1) for traffic in lost))
        seconds_until_back = time.monotonic() - killed
        while len(processes_of(stack, "api")) < 2:  # noqa: ASYNC110 - the supervisor is another process
            await asyncio.sleep(0.05)
        await asyncio.gather(*(traffic.answers(12) for traffic in (*lost, *kept)))
    print(f"streams ended after {1e3 * seconds_until_told:.0f} ms, others by {seconds_until_back:.2f} s")
    await asyncio.gather(*(client.close() for clients in by_server.values() for client in clients))


async def connected_to_each(stack: Stack, num_clients: int) -> dict[psutil.Process, list[Client]]:
    """Clients with a connection of their own each, by the API process which that leads to: `num_clients` of each."""
    found: dict[psutil.Process, list[Client]] = {server: [] for server in processes_of(stack, "api")}
    assert len(found) == 2
    connections = {server: len(server.net_connections()) for server in found}
    while min(map(len, found.values())) < num_clients:
        client = stack.client()
        # The connections of one process are else shared by all its channels.
        options = [("grpc.use_local_subchannel_pool", 1)]
        client.inference = inference_pb2_grpc.InferenceServiceStub(
            grpc.aio.insecure_channel(stack.inference.address, options=options)
        )
        await ask(client, 0)
        (server,) = [server for server in found if len(server.net_connections()) > connections[server]]
        connections[server] += 1
        found[server].append(client)
    return found


async def test_sigterm_lets_running_streams_end(world: TinyWorld, replica: Replica) -> None:
    """The last test here: the replica stays down."""
    stack, client = replica
    async with grpc.aio.insecure_channel(stack.inference.address) as channel:
        request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
        health = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        streams = await long_streams(client, RESIDENT)
        stopping = asyncio.create_task(stack.inference.stop())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health.read() is grpc.aio.EOF
        await asyncio.gather(*(stream.check(world) for stream in streams))
        assert await stopping == 0
        assert (await refusal(ask(client, 0))).code == "UNAVAILABLE"
