"""`python -m tests.bench.replica_restart`: what a new adapter process asks of a registry of 100,000 adapters (SQLite).

A process with the registry's side of a replica, thrice: with no answers of before; with saved ones, whose watch is
resumed; and with saved ones of another life of the database, which are asked for again. Seconds and processor time
until it knows what the replica shall hold, which SERVING waits for, until its watch is live, and until it has asked.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from inference_service.adapters.registry_client import RegistryClient
from inference_service.adapters.resolution import BaseModelIdentity
from inference_service.adapters.saved_answers import SavedAnswers
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import resources_pb2
from registry_service import migrations
from shared.base_model import MODULES, fingerprint, parse_config
from tests.bench.process_stats import cpu_seconds
from tests.bench.random_adapters import write_adapters
from tests.bench.registry import running
from tests.bench.registry_figures import Registry, source_name
from tests.bench.registry_rows import copy_adapter
from tests.bench.shapes import SHAPES

BASE, MODEL = "llama", SHAPES["tiny"]
PINNED, ASKED, MISSED = 16, 100, 100  # adapters; MISSED change while no process watches


class Told:
    """What `residency.Residency` would hear."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.is_complete = asyncio.Event()

    def start_over(self) -> None: ...

    def failed(self) -> None: ...

    def changed(self, change: pb.AdapterChange) -> None:
        if change.adapter.residency == resources_pb2.Adapter.RESIDENCY_PINNED:
            self.wanted.add(change.adapter.name)

    def complete(self, revision: int) -> None:
        self.is_complete.set()


async def restart(name: str, registry: Registry, answers: Path) -> None:
    """One adapter process: prints what it took, and asks for some adapters, so that there are answers to save."""
    identity = BaseModelIdentity(BASE, fingerprint(MODEL))
    began, before = time.monotonic(), (cpu_seconds(registry.pid), time.process_time())
    client, told = RegistryClient(registry.address, identity, saved=SavedAnswers(answers)), Told()

    def since() -> str:
        server, own = cpu_seconds(registry.pid) - before[0], time.process_time() - before[1]
        return f"{time.monotonic() - began:8.2f} s  CPU: registry {server:6.2f} s, adapter process {own:5.2f} s"

    watching = asyncio.create_task(client.keep_watching(told))
    await told.is_complete.wait()
    assert len(told.wanted) == PINNED
    print(f"{name:32} knows what is wanted {since()}", flush=True)
    while client.heard_at is None:  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0.02)
    print(f"{'':32} watches all          {since()}", flush=True)
    for number in range(ASKED):
        await client.resolve(f"default/{source_name(number)}")
    print(f"{'':32} has asked for {ASKED:4}   {since()}", flush=True)
    await asyncio.sleep(6.0)  # the watch's place is written every five seconds
    watching.cancel()
    await client.close()


async def update(registry: Registry, number: int, mask: str, **fields: object) -> None:
    name = f"namespaces/default/adapters/{source_name(number)}"
    adapter = resources_pb2.Adapter(name=name, **fields)  # type: ignore[arg-type]  # one of its fields
    await registry.stub.UpdateAdapter(pb.UpdateAdapterRequest(adapter=adapter, update_mask={"paths": [mask]}))


async def measure(folder: Path, num_adapters: int) -> None:
    url, store = f"sqlite:///{folder}/registry.db", folder / "store"
    names = [source_name(number) for number in range(ASKED + MISSED)]
    write_adapters(store, names, parse_config(MODEL), 2, MODULES)
    async with running(url, folder, store, None) as registry:
        await registry.stub.RegisterBaseModel(pb.RegisterBaseModelRequest(id=BASE, config_json=json.dumps(MODEL)))
        for name in names:
            source = resources_pb2.AdapterSource(uri=f"file://store/{name}")
            request = pb.RegisterAdapterRequest(adapter_id=name, base_model=BASE, source=source, aliases=["prod"])
            await registry.stub.RegisterAdapter(request)
    await asyncio.to_thread(copy_adapter, url, names[0], 0, num_adapters)
    async with running(url, folder, store, None) as registry:
        for number in range(PINNED):
            await update(registry, number, "residency", residency=resources_pb2.Adapter.RESIDENCY_PINNED)
        await restart("no answers of before", registry, folder / "answers.sqlite")
        for number in range(MISSED):
            await update(registry, number + ASKED // 2, "description", description="meanwhile")
        await restart("saved answers, a watch to resume", registry, folder / "answers.sqlite")
    migrations.new_epoch(url)
    async with running(url, folder, store, None) as registry:
        await restart("saved answers of another life", registry, folder / "answers.sqlite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), arguments.adapters))


if __name__ == "__main__":
    main()
