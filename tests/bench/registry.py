"""`python -m tests.bench.registry`: a registry of 100,000 adapters of five versions, on Postgres and on SQLite.

Server, database and client run on the same two cores. Figures beside their targets: ResolveAdapter from memory and from
the database in open loop, changes told to watches, the snapshot of a watch, registrations, lists.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from examples.stack import REGISTRY_SERVICE, ServerProcess, free_address
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc, resources_pb2
from registry_service import migrations
from registry_service.config import RegistryConfig
from shared.base_model import MODULES, parse_config
from tests.bench.open_loop import LoadProcess
from tests.bench.random_adapters import write_adapters
from tests.bench.registry_figures import (
    LISTS,
    VERSIONS,
    Figure,
    Registry,
    Scale,
    closed_loop,
    fan_out,
    lists,
    register,
    resolve,
    snapshot,
    source_name,
    weighted_choice,
)
from tests.bench.registry_plans import plans
from tests.bench.registry_rows import copy_adapter, copy_name
from tests.bench.shapes import SHAPES
from tests.registry_service.embedded_postgres import EmbeddedPostgres, embedded_postgres

TEMPLATES = {"llama": 0.9, "mistral": 0.1}  # base models, and their shares of the adapters
HOT_ADAPTERS = 5_000  # asked for again and again
SNAPSHOT = "mistral"  # whose adapters a watch begins with


async def measure(
    registry: Registry, other: str | None, scale: Scale, rates: tuple[float, float]
) -> AsyncIterator[list[Figure]]:
    """Everything, on one database. `rates`: of hits and of misses; `other`: a second registry on the same database."""
    load = LoadProcess()
    pick = random.Random(1)
    numbers = pick.sample(range(scale.adapters), scale.adapters)
    hot = [copy_name(number) for number in numbers[: min(HOT_ADAPTERS, scale.adapters // 4)]]
    cold = [copy_name(number) for number in numbers[len(hot) :]]
    try:
        await closed_loop(registry.stub.ResolveAdapter, [pb.ResolveAdapterRequest(reference=name) for name in hot], 16)
        rounds = [
            [_reference(pick.choice(hot), pick) for _ in range(int(rates[0] * scale.seconds))]
            for _ in range(scale.rounds)
        ]
        yield await resolve(registry, load, "hits", rounds, rates[0], (5.0, 0.8))
        each = min(int(rates[1] * scale.seconds), len(cold) // scale.rounds)
        misses = [[_reference(name, pick) for name in cold[n * each : (n + 1) * each]] for n in range(scale.rounds)]
        yield await resolve(registry, load, "misses", misses, rates[1], (10.0, 2.0))
        yield await fan_out(registry, registry.address, scale)
        if other:
            yield await fan_out(registry, other, scale)
        yield await snapshot(registry, load, scale, SNAPSHOT, rounds[0])
        yield await register(registry, scale)
        yield await lists(registry, scale)
    finally:
        load.close()


def _reference(adapter: str, pick: random.Random) -> str:
    """Half of them name an alias of two targets."""
    return adapter + pick.choice(["", "@prod"])


async def prepare(registry: Registry, model: str, scale: Scale) -> None:
    """Register what will be copied: an adapter of each base model."""
    for base in TEMPLATES:
        await registry.stub.RegisterBaseModel(pb.RegisterBaseModelRequest(id=base, config_json=model))
        for version in range(VERSIONS):
            await registry.stub.RegisterAdapter(
                pb.RegisterAdapterRequest(
                    adapter_id=f"template-{base}",
                    base_model=base,
                    source=resources_pb2.AdapterSource(uri=f"file://store/{source_name(version)}"),
                    description="fine-tuned for answers of one team",
                )
            )
        targets = [resources_pb2.AliasTarget(version=number, weight=weight) for number, weight in ((4, 0.9), (5, 0.1))]
        await registry.stub.SetAdapterAlias(pb.SetAdapterAliasRequest(name=f"template-{base}@prod", targets=targets))


def fill(url: str, scale: Scale) -> None:
    """Copy the adapters until there are enough."""
    first = 0
    for base, share in TEMPLATES.items():
        count = int(share * scale.adapters)
        copy_adapter(url, f"template-{base}", first, count)
        first += count


@asynccontextmanager
async def running(
    url: str, folder: Path, store: Path, database_pid: int | None, *flags: str
) -> AsyncIterator[Registry]:
    """A registry process on the database at `url`."""
    address = free_address()
    flags = (f"--database={url}", f"--file-root=store={store}", "--log-level=warning", *flags)
    process = ServerProcess("registry_service", flags, address, REGISTRY_SERVICE, folder / f"registry-{address}.log")
    await process.start()
    try:
        await process.ready(60)
        async with grpc.aio.insecure_channel(address) as channel:
            yield Registry(process, registry_pb2_grpc.AdapterRegistryServiceStub(channel), url, database_pid)
    finally:
        await process.stop()


async def bench(database: str, url: str, folder: Path, scale: Scale, postgres: EmbeddedPostgres | None) -> list[Figure]:
    """All figures of one database."""
    store, model = folder / "store", SHAPES["tiny"]
    if not store.exists():
        names = [source_name(number) for number in range(max(scale.registrations, VERSIONS))]
        write_adapters(store, names, parse_config(model), 2, MODULES)
    pid = postgres.pid if postgres else None
    async with running(url, folder, store, pid) as registry:
        await prepare(registry, json.dumps(model), scale)
    began = time.monotonic()
    await asyncio.to_thread(fill, url, scale)
    print(f"{database}: {scale.adapters} adapters written in {time.monotonic() - began:.0f} s", flush=True)
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(running(url, folder, store, pid))
        other = await stack.enter_async_context(running(url, folder, store, pid)) if postgres else None
        rates = (1000.0, 300.0 if postgres else 200.0)
        print(f"\n{database:48}{'measured':>12}{'target':>10}")
        figures = []
        async for some in measure(registry, other and other.address, scale, rates):
            show(some)
            figures += some
    config = RegistryConfig(listen="127.0.0.1:0", database=url)
    for line in await plans(config, copy_name(1), LISTS):
        print(f"  {line}")
    return figures


@contextmanager
def databases(names: Sequence[str], folder: Path) -> Iterator[dict[str, tuple[str, EmbeddedPostgres | None]]]:
    """URLs of new databases, and the server that has them."""
    found: dict[str, tuple[str, EmbeddedPostgres | None]] = {}
    if "sqlite" in names:
        found["sqlite"] = (f"sqlite:///{folder}/registry.db", None)
    if "postgres" not in names:
        yield found
        return
    with embedded_postgres("shared_buffers=512MB", "max_wal_size=4GB") as server:
        url = server.create_database("registry")
        migrations.upgrade(url)
        yield {"postgres": (url, server), **found}


def show(figures: Sequence[Figure]) -> None:
    """Print lines of the table; a figure that misses its target is marked."""
    for name, value, unit, target, more in figures:
        wanted = f"≤ {target:g} {unit}" if target else ""
        mark = "!" if target and value > target else " "
        print(f"{name:48}{value:8.2f} {unit:3}{mark}{wanted:>10}  {more}", flush=True)


def _plain(figure: Figure) -> dict[str, Any]:
    """For JSON, which knows no infinity: where calls failed there is no figure."""
    return {**figure._asdict(), "value": figure.value if math.isfinite(figure.value) else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", default="postgres,sqlite")
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each round of resolutions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--registrations", type=int, default=60, help="and lists, of each kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    scale = Scale(arguments.adapters, arguments.seconds, arguments.rounds, arguments.registrations)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    began = time.monotonic()
    print(f"load before: {os.getloadavg()[0]:.1f}; {scale}")
    choices = weighted_choice()
    results: dict[str, Any] = {"scale": scale._asdict(), "load": os.getloadavg()}
    results["replica"] = [_plain(figure) for figure in choices]
    print(f"\n{'on a replica':48}{'measured':>12}{'target':>10}")
    show(choices)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with databases(arguments.databases.split(","), folder) as found:
            for database, (url, server) in found.items():
                figures = uvloop.run(bench(database, url, folder, scale, server))
                results[database] = [_plain(figure) for figure in figures]
    print(f"\n{time.monotonic() - began:.0f} s; load after: {os.getloadavg()[0]:.1f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
