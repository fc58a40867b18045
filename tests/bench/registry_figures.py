"""What is measured of a registry: resolutions, watches, registrations, lists."""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc

from examples.stack import REGISTRY_SERVICE, ServerProcess
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc, resources_pb2
from shared.weighted_choice import choose
from tests.bench.open_loop import Latencies, LoadProcess, quantile
from tests.bench.process_stats import cpu_seconds, peak_bytes, reset_peak, resident_bytes
from tests.bench.registry_rows import copy_name

VERSIONS = 5  # of each adapter
RESOLVE = f"/{REGISTRY_SERVICE}/ResolveAdapter"
WATCHES, CHANGES, WRITERS = 50, 10, 32
KEYS = 100_000
LISTS = {
    "by name": {},
    "base model, label of 1 %, state": {
        "filter": 'base_model = "mistral" AND labels.team = "team-7" AND state = READY'
    },
    "label of one adapter": {"filter": 'labels.owner = "user-77"'},
    "last changed first": {"order_by": "update_time desc"},
    "part of a description": {"filter": 'description:"nothing has this"'},
}


class Figure(NamedTuple):
    """One line of the table. `target` 0: there is none."""

    name: str
    value: float
    unit: str
    target: float = 0.0
    more: str = ""


class Scale(NamedTuple):
    adapters: int
    seconds: float
    rounds: int
    registrations: int


class Registry:
    """A registry process, and one connection to it. `database_pid`: of the database's server, if there is one."""

    def __init__(self, process: ServerProcess, stub: Any, url: str, database_pid: int | None) -> None:
        assert process.process is not None
        self.address, self.pid, self.stub, self.url = process.address, process.process.pid, stub, url
        self._database_pid = database_pid

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the registry, and of its database."""
        return cpu_seconds(self.pid), cpu_seconds(self._database_pid) if self._database_pid else 0.0


def source_name(number: int) -> str:
    """The folder of an adapter that can be registered."""
    return f"s{number:04}"


async def resolve(
    registry: Registry, load: LoadProcess, name: str, rounds: Sequence[Sequence[str]], rate: float,
    targets: tuple[float, float],
) -> list[Figure]:  # fmt: skip
    """Rounds of resolutions in open loop. `targets`: milliseconds of p99, and of the server's CPU time for each."""
    before, found = registry.cpu_seconds(), []
    for references in rounds:
        found.append(await load.run(registry.address, RESOLVE, _serialized(references), rate))
    server, database = _cpu_of_each(registry, before, sum(map(len, rounds)))
    found.sort(key=lambda each: quantile(each.answered, 0.99))
    middle = found[len(found) // 2]
    least = f"; least p99 of {len(found)} rounds {quantile(found[0].answered, 0.99):.1f}"
    return [
        Figure(f"{name}, {rate:g}/s: p99", quantile(middle.answered, 0.99), "ms", targets[0], _spread(middle) + least),
        Figure(f"{name}: server CPU for each", server, "ms", targets[1], _of_database(database)),
    ]


def _serialized(references: Sequence[str]) -> list[bytes]:
    return [pb.ResolveAdapterRequest(reference=reference).SerializeToString() for reference in references]


def _cpu_of_each(registry: Registry, before: tuple[float, float], count: int) -> tuple[float, float]:
    """Milliseconds of each of `count` calls since `before`, of the registry and of its database."""
    server, database = registry.cpu_seconds()
    return 1e3 * (server - before[0]) / count, 1e3 * (database - before[1]) / count


def _of_database(milliseconds: float) -> str:
    return f"+ {milliseconds:.2f} of the database" if milliseconds else ""


def _spread(found: Latencies) -> str:
    """The median, the worst, the part that is the client's own, and how many failed."""
    p50, worst, late = quantile(found.answered, 0.5), found.answered[-1], quantile(found.late, 0.99)
    failed = sum(map(math.isinf, found.answered))
    said = f"; {failed} of {len(found.answered)} failed" if failed else ""
    return f"p50 {p50:.2f}, worst {worst:.1f}; sent late by p99 {late:.1f}{said}"


async def fan_out(registry: Registry, watched: str, scale: Scale) -> list[Figure]:
    """Changes of an alias, told to 50 watches of the registry at address `watched`, each on its own connection."""
    async with AsyncExitStack() as stack:
        arrived: asyncio.Queue[int] = asyncio.Queue()
        request = pb.WatchAdaptersRequest(parent="namespaces/-", skip_snapshot=True)

        async def watch() -> None:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(watched))
            async for response in registry_pb2_grpc.AdapterRegistryServiceStub(channel).WatchAdapters(request):
                for change in response.changes or [pb.AdapterChange()] * response.snapshot_complete:
                    arrived.put_nowait(change.revision)

        tasks = [asyncio.ensure_future(watch()) for _ in range(WATCHES)]
        stack.callback(lambda: [task.cancel() for task in tasks])
        for _ in tasks:
            await asyncio.wait_for(arrived.get(), 30)  # it is live
        told = []
        for number in range(CHANGES):
            began = time.monotonic()
            changed = await registry.stub.SetAdapterAlias(_moved(copy_name(number)))
            seen = 0
            while seen < WATCHES:
                seen += await asyncio.wait_for(arrived.get(), 30) == changed.registry_revision
            told.append(1e3 * (time.monotonic() - began))
            await asyncio.sleep(random.uniform(0.2, 0.5))  # at any time between two polls
        cost = f"median {statistics.median(told):.0f}, of {CHANGES} changes, from the request on"
        await asyncio.gather(*(task for task in tasks if task.cancel()), return_exceptions=True)
    where = "" if watched == registry.address else " of another registry"
    return [Figure(f"a change at {WATCHES} watches{where}: slowest", max(told), "ms", 1000, cost)]


def _moved(adapter: str) -> pb.SetAdapterAliasRequest:
    target = resources_pb2.AliasTarget(version=random.randint(1, VERSIONS), weight=random.uniform(0.5, 1.0))
    return pb.SetAdapterAliasRequest(name=f"{adapter}@canary", targets=[target])


async def snapshot(
    registry: Registry, load: LoadProcess, scale: Scale, base_model: str, hits: Sequence[str]
) -> list[Figure]:
    """One watch reads all adapters of a base model: time, and the server's processor time and memory; then again beside
    hits."""
    reset_peak(registry.pid)
    resident, cpu = resident_bytes(registry.pid), registry.cpu_seconds()
    began = time.monotonic()
    count, num_bytes = await _read_snapshot(registry, base_model)
    seconds, grown = time.monotonic() - began, peak_bytes(registry.pid) - resident
    server, database = (now - then for now, then in zip(registry.cpu_seconds(), cpu, strict=True))
    more = f"{1e3 * server / count:.2f} ms CPU each {_of_database(1e3 * database / count)}; {num_bytes / 1e6:.0f} MB"

    reading = asyncio.ensure_future(_read_snapshot(registry, base_model))
    rate = 200.0
    count_beside = int(rate * min(scale.seconds, 0.7 * seconds)) + 1
    beside = await load.run(registry.address, RESOLVE, _serialized(hits[:count_beside]), rate)
    reading.cancel()
    return [
        Figure(f"snapshot of {count} adapters", seconds, "s", 0, more),
        Figure("snapshot: the server's memory grew by", grown / 1e6, "MB"),
        Figure(f"hits beside a snapshot, {rate:g}/s: p99", quantile(beside.answered, 0.99), "ms", 0, _spread(beside)),
    ]


async def _read_snapshot(registry: Registry, base_model: str) -> tuple[int, int]:
    """Adapters and bytes."""
    count = num_bytes = 0
    async with grpc.aio.insecure_channel(registry.address) as channel:
        stub = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
        async for response in stub.WatchAdapters(pb.WatchAdaptersRequest(parent="namespaces/-", base_model=base_model)):
            count, num_bytes = count + len(response.changes), num_bytes + response.ByteSize()
            if response.snapshot_complete:
                break
    return count, num_bytes


async def register(registry: Registry, scale: Scale) -> list[Figure]:
    """Registrations of small adapters: by one writer with pauses and without, by 32, and by 32 on one adapter."""
    figures = []
    for name, writers, pause, adapter in (
        ("1 writer, 50 ms apart", 1, 0.05, ""),
        ("1 writer", 1, 0.0, ""),
        (f"{WRITERS} writers", WRITERS, 0.0, ""),
        (f"{WRITERS} writers of one adapter", WRITERS, 0.0, "of-all"),
    ):
        before, began = registry.cpu_seconds(), time.monotonic()
        prefix = f"new-{time.monotonic_ns() % 10**9}"
        asks = [
            pb.RegisterAdapterRequest(
                adapter_id=adapter or f"{prefix}-{number}",
                base_model="llama",
                source=resources_pb2.AdapterSource(uri=f"file://store/{source_name(number)}"),
            )
            for number in range(scale.registrations)
        ]
        taken = sorted(await closed_loop(registry.stub.RegisterAdapter, asks, writers, pause))
        seconds = time.monotonic() - began
        server, database = _cpu_of_each(registry, before, len(asks))
        more = f"p99 {quantile(taken, 0.99):.1f}; {len(asks) / seconds:.0f} a second; "
        more += f"{server:.1f} ms CPU each {_of_database(database)}"
        figures.append(Figure(f"RegisterAdapter, {name}: median", statistics.median(taken), "ms", 0, more))
    return figures


def weighted_choice() -> list[Figure]:
    """How a replica divides fixed keys among versions of weights 70, 20, 10, and which move when the 10 become 30."""
    keys = [f"session-{number}" for number in range(KEYS)]
    before = [choose("uid", "prod", key, [(1, 70), (2, 20), (3, 10)]) for key in keys]
    after = [choose("uid", "prod", key, [(1, 70), (2, 20), (3, 30)]) for key in keys]
    shares = {1: 0.7, 2: 0.2, 3: 0.1}
    error = max(abs(before.count(version) / KEYS - share) for version, share in shares.items())
    moved = sum(old != new for old, new in zip(before, after, strict=True)) / KEYS
    elsewhere = sum(new not in (old, 3) for old, new in zip(before, after, strict=True))
    must = f"must move: {100 * (30 / 120 - 10 / 100):.1f} points; {elsewhere} keys moved elsewhere"
    return [
        Figure(f"shares of {KEYS} keys: largest error", 100 * error, "pt", 1.0),
        Figure("keys that move when 10 of 100 become 30 of 120", 100 * moved, "pt", 0, must),
    ]


async def closed_loop(rpc: Any, requests: Sequence[Any], at_a_time: int, pause: float = 0.0) -> list[float]:
    """Milliseconds of each call; whoever has its answer sends the next."""
    waiting, taken = list(requests), []

    async def caller() -> None:
        while waiting:
            request = waiting.pop()
            began = time.monotonic()
            await rpc(request)
            taken.append(1e3 * (time.monotonic() - began))
            await asyncio.sleep(pause)

    await asyncio.gather(*(caller() for _ in range(at_a_time)))
    return taken


async def lists(registry: Registry, scale: Scale) -> list[Figure]:
    """First pages of 50, one call after another."""
    figures = []
    for name, fields in LISTS.items():
        requests = [pb.ListAdaptersRequest(parent="namespaces/default", **fields)] * scale.registrations
        before = registry.cpu_seconds()
        taken = sorted(await closed_loop(registry.stub.ListAdapters, requests, 1))
        server, database = _cpu_of_each(registry, before, len(taken))
        more = f"p50 {quantile(taken, 0.5):.1f}; {server:.1f} ms CPU each {_of_database(database)}"
        figures.append(Figure(f"ListAdapters, {name}: p99", quantile(taken, 0.99), "ms", 0, more))
    return figures
