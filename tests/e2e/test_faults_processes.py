"""Processes that are killed under load: the registry, the engine, the adapter process, an API process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import grpc
import psutil
import pytest
import pytest_asyncio

from examples.stack import Stack
from loraplex import Client
from loraplex.inference.v1 import control_pb2, inference_pb2_grpc
from tests.e2e.processes import kill, processes_of
from tests.e2e.tiny_stack import PROMPTS, TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, at_last, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
LONG = 200  # tokens of a stream that is certainly under way when its server dies
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


async def long_streams(world: TinyWorld, client: Client) -> list[asyncio.Task[None]]:
    """A stream of `LONG` tokens of each resident adapter, under way and to be compared with PEFT's at its end."""
    begun = [asyncio.Event() for _ in RESIDENT]

    async def stream(reference: str, content: str, is_begun: asyncio.Event) -> None:
        ids, logprobs = [], []
        stop, output = {"max_tokens": LONG, "ignore_eos": True}, {"token_ids": True, "logprobs": 0}
        events = client.generate(PROMPTS[0], adapter=reference, temperature=0, stop=stop, output=output, timeout=60)
        async for event in events:
            ids += event.delta.token_ids
            logprobs += [token.logprob for token in event.delta.logprobs]
            if ids:
                is_begun.set()
        found = world.compare(content, 0, ids, logprobs)
        assert len(ids) == LONG
        assert not found.mismatches

    pairs = zip(RESIDENT.items(), begun, strict=True)
    tasks = [asyncio.create_task(stream(*item, is_begun)) for item, is_begun in pairs]
    async with asyncio.timeout(30):
        await asyncio.gather(*(is_begun.wait() for is_begun in begun))
    assert not any(task.done() for task in tasks)
    return tasks


async def test_without_its_registry_a_replica_serves_what_it_knows(world: TinyWorld, replica: Replica) -> None:
    stack, client = replica
    known = world.contents[2]
    await register_content(client, known, known)
    await ask(client, 0, known)
    await client.call(client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=known)))
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
        await traffic.answers(20)
        await stack.registry.start()
        await stack.registry.ready(30)
        back = time.monotonic()
        new = world.contents[3]
        await at_last(lambda: register_content(client, new, new), 10)
        answer, _ = await at_last(lambda: ask(client, 0, new), 10)
        assert_is_of(world, new, 0, answer)
        print(f"a new adapter answers {time.monotonic() - back:.2f} s after the registry is back;", end=" ")
        print(f"refused without it in {seconds_until_refused:.2f} s")
        await traffic.answers(8)


async def test_a_killed_engine_ends_its_streams_at_once_and_comes_back(world: TinyWorld, replica: Replica) -> None:
    stack, client = replica
    streams = await long_streams(world, client)
    async with Traffic(world, client, RESIDENT, tolerated=AWAY) as traffic:
        (engine,) = processes_of(stack, "engine")
        killed = time.monotonic()
        kill(engine)
        errors = await asyncio.wait_for(asyncio.gather(*(refusal(stream) for stream in streams)), 5)
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


async def test_requests_do_not_notice_that_the_adapter_process_dies(world: TinyWorld, replica: Replica) -> None:
    stack, client = replica
    new = world.contents[4]
    await register_content(client, new, new)
    async with Traffic(world, client, RESIDENT, lines=6) as traffic:
        streams = await long_streams(world, client)
        (adapters,) = processes_of(stack, "adapters")
        kill(adapters)
        killed = time.monotonic()
        assert_is_of(world, new, 0, await ask(client, 0, new))
        seconds = time.monotonic() - killed
        await asyncio.gather(*streams)
        await traffic.answers(20)
    print(f"a new adapter answers {seconds:.2f} s after the death")


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
        streams = await long_streams(world, by_server[victim][0])
        killed = time.monotonic()
        kill(victim)
        for error in await asyncio.gather(*(refusal(stream) for stream in streams)):
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
