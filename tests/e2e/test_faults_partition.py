"""Two replicas, one of which is cut off without a word: from the registry, or from everybody."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.stack import Stack, free_address
from loraplex import Client
from loraplex.registry.v1 import registry_pb2
from tests.e2e.network import Namespace, Proxy, can_make_namespaces
from tests.e2e.replicas import client_of
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, at_last, refusal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
SECONDS = 90.0


class Pair(NamedTuple):
    """Two replicas of one registry, and what cuts the second off and heals it.

    `both`: a client that sends to them in turn; `first`, `second`: clients of one each.
    """

    both: Client
    first: Client
    second: Client
    cut: Callable[[], None]
    heal: Callable[[], None]


async def _clients(parts: AsyncExitStack, stack: Stack, second: str) -> tuple[Client, Client, Client]:
    """Of both, of the first and of the second, once both have answered for every adapter."""
    first = stack.inference.address
    clients = client_of(stack, first, second), client_of(stack, first), client_of(stack, second)
    for client in clients:
        parts.push_async_callback(client.close)
    for client in clients[1:]:
        for name in RESIDENT:
            await at_last(lambda client=client, name=name: ask(client, 0, name), SECONDS)
    return clients


def _each(proxies: list[Proxy], do: Callable[[Proxy], None]) -> None:
    for proxy in proxies:
        do(proxy)


@asynccontextmanager
async def behind_proxies(world: TinyWorld, run: Path, *, only_registry: bool = False) -> AsyncIterator[Pair]:
    """The second replica is reached, and reaches the registry, through proxies that can fall silent."""
    async with AsyncExitStack() as parts:
        stack, _ = await parts.enter_async_context(world.serving(run, names=["content-0", "content-1"]))
        to_registry = await parts.enter_async_context(Proxy(stack.registry.address))
        second = stack.another_replica(free_address(), "second", registry=to_registry.address)
        to_second = await parts.enter_async_context(Proxy(second.address))
        parts.push_async_callback(second.stop)
        await second.start()
        await second.ready(120)
        proxies = [to_registry] if only_registry else [to_registry, to_second]
        clients = await _clients(parts, stack, to_second.address)
        yield Pair(*clients, lambda: _each(proxies, Proxy.cut), lambda: _each(proxies, Proxy.heal))


@asynccontextmanager
async def in_namespaces(world: TinyWorld, run: Path) -> AsyncIterator[Pair]:
    """The second replica runs on what is a machine of its own to the network; the cable can be pulled."""
    async with AsyncExitStack() as parts:
        namespace = parts.enter_context(Namespace())
        registry = free_address(namespace.here)
        stack, _ = await parts.enter_async_context(
            world.serving(run, names=["content-0", "content-1"], registry=registry)
        )
        address = f"{namespace.there}:{free_address().rpartition(':')[2]}"
        second = stack.another_replica(address, "second", prefix=namespace.prefix)
        parts.push_async_callback(second.stop)
        await second.start()
        await second.ready(120)
        yield Pair(*await _clients(parts, stack, address), namespace.cut, namespace.heal)


async def until_replicas(client: Client, count: int) -> None:
    """Returns when so many have a lease."""
    async with asyncio.timeout(SECONDS):
        while True:
            listed = await client.call(client.registry.ListReplicas(registry_pb2.ListReplicasRequest()))
            if len(listed.replicas) == count:
                return
            await asyncio.sleep(0.1)


async def until_version(client: Client, number: int) -> float:
    """Seconds until `moving` means this version."""
    started = time.monotonic()
    async with asyncio.timeout(SECONDS):
        while True:
            answer = await ask(client, 0, "moving")
            assert answer.started is not None
            if answer.started.adapter_version.endswith(f"/{number}"):
                return time.monotonic() - started
            await asyncio.sleep(0.05)


async def test_a_replica_that_the_registry_cannot_reach(world: TinyWorld, tmp_path: Path) -> None:
    """It serves what it knows, as it knew it, and catches up; the other one goes on as if nothing were."""
    old, new = world.contents[2:4]
    async with behind_proxies(world, tmp_path / "run", only_registry=True) as pair:
        await register_content(pair.first, "moving", old)
        for client in (pair.first, pair.second):
            await until_version(client, 1)
        async with Traffic(world, pair.first, RESIDENT, lines=2), Traffic(world, pair.second, RESIDENT, lines=2) as cut:
            pair.cut()
            started = time.monotonic()
            await register_content(pair.first, "moving", new)
            seconds = await until_version(pair.first, 2)
            answer = await ask(pair.second, 0, "moving")
            assert answer.started is not None
            assert answer.started.adapter_version.endswith("/1")
            assert_is_of(world, old, 0, answer)
            error = await refusal(ask(pair.second, 0, "never-heard-of"))
            assert error.reason == "REGISTRY_UNAVAILABLE"
            assert error.retry_after is not None
            await until_replicas(pair.first, 1)
            print(f"the other one had the new version after {seconds:.2f} s;", end=" ")
            print(f"the lease was over after {time.monotonic() - started:.1f} s")
            await cut.answers(8)
            pair.heal()
            seconds = await until_version(pair.second, 2)
            assert_is_of(world, new, 0, await ask(pair.second, 0, "moving"))
            await until_replicas(pair.first, 2)
            print(f"after the cut the new version was there within {seconds:.2f} s;", end=" ")


NETWORKS = {
    "proxy": behind_proxies,
    "namespace": in_namespaces,
}


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_replica_that_nobody_can_reach(world: TinyWorld, tmp_path: Path, network: str) -> None:
    """Its streams end with UNAVAILABLE; requests then go to the other one, whose own clients notice nothing."""
    if network == "namespace" and not can_make_namespaces():
        pytest.skip("this user may make no network namespaces")
    async with (
        NETWORKS[network](world, tmp_path / "run") as pair,
        Traffic(world, pair.first, RESIDENT, lines=2) as beside,
        Traffic(world, pair.both, RESIDENT, tolerated={"UNAVAILABLE"}) as traffic,
    ):
        await traffic.answers(12)
        pair.cut()
        started = time.monotonic()
        async with asyncio.timeout(SECONDS):
            while not traffic.failed:  # noqa: ASYNC110 - the network ends it
                await asyncio.sleep(0.05)
        seconds = time.monotonic() - started
        await traffic.answers(12)
        num_failed = traffic.failed.total()
        await traffic.answers(24)
        assert traffic.failed.total() == num_failed, "requests still went to the replica that is cut off"
        await beside.answers(8)
        pair.heal()
        healed = time.monotonic()
        answer, _ = await at_last(lambda: ask(pair.second, 0, "content-0"), SECONDS)
        assert_is_of(world, "content-0", 0, answer)
        print(f"its streams ended after {seconds:.1f} s; it answers {time.monotonic() - healed:.1f} s after the cut;")
        await traffic.answers(12)
