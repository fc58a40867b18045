"""PRELOAD and PINNED reach replicas, present and future, and outlive them; the registry tells the truth about it."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from loraplex import Client
from loraplex.inference.v1 import control_pb2
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import LoraplexError
from tests.e2e.processes import kill, processes_of
from tests.e2e.tiny_stack import TinyWorld, register_content

SECONDS = 120.0
ON_DEMAND = [("one", "ON_DEMAND")]
GPU = control_pb2.LoadedAdapter.LEVEL_GPU


async def set_residency(client: Client, name: str, residency: Any) -> None:
    adapter = resources_pb2.Adapter(name=f"namespaces/default/adapters/{name}", residency=residency)
    request = registry_pb2.UpdateAdapterRequest(adapter=adapter, update_mask=FieldMask(paths=["residency"]))
    await client.call(client.registry.UpdateAdapter(request))


async def serving(client: Client, name: str) -> resources_pb2.ServingStatus:
    request = registry_pb2.GetAdapterRequest(name=f"namespaces/default/adapters/{name}")
    return (await client.call(client.registry.GetAdapter(request))).serving


async def until(client: Client, name: str, is_so: Callable[[resources_pb2.ServingStatus], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    status: Any = None
    while not (isinstance(status, resources_pb2.ServingStatus) and is_so(status)):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.1)
        try:
            status = await serving(client, name)
        except LoraplexError as error:  # the channel has not found the registry again
            status = error


def is_ready(status: resources_pb2.ServingStatus) -> bool:
    return (status.ready_replicas, status.target_replicas) == (1, 1)


async def loaded(client: Client) -> dict[str, bool]:
    """What is on the device, and whether it is pinned."""
    request = control_pb2.ListLoadedAdaptersRequest()
    rpc = client.control.ListLoadedAdapters(request, wait_for_ready=True)  # a channel is slow to come back
    found = (await client.call(rpc)).adapters
    return {a.adapter_version.split("/")[3]: a.pinned for a in found if a.level == GPU}


async def test_residency_outlives_processes_and_services(world: TinyWorld, tmp_path: Path) -> None:
    """One adapter's files are gone when the replica starts again: it serves all the same, and the registry says why."""
    pinned, preloaded, other, content = world.contents[:4]
    names, lease = [pinned, preloaded, other], ["--replica-lease-seconds=5"]
    async with world.serving(tmp_path, "--replica-name=one", names=names, registry_flags=lease) as (stack, client):
        lost = world.copy(content, tmp_path)
        await register_content(client, "lost", content, root="copies")
        await until(client, pinned, lambda status: [(w.replica, w.reason) for w in status.not_ready] == ON_DEMAND)
        await set_residency(client, pinned, resources_pb2.Adapter.RESIDENCY_PINNED)
        await set_residency(client, preloaded, resources_pb2.Adapter.RESIDENCY_PRELOAD)
        for name in (pinned, preloaded):
            await until(client, name, is_ready)
        await until_loaded(client, {pinned: True, preloaded: False})

        for role in ("engine", "adapters"):  # each is started again, and gets everything again
            (process,) = processes_of(stack, role)
            kill(process)
            await until_loaded(client, {pinned: True, preloaded: False})

        await stack.inference.stop()
        await until(client, pinned, lambda status: status.target_replicas == 0)  # its lease is over
        shutil.rmtree(lost)
        await set_residency(client, "lost", resources_pb2.Adapter.RESIDENCY_PINNED)
        await stack.inference.start()
        await stack.inference.ready(SECONDS)
        assert await loaded(client) == {pinned: True, preloaded: False}  # readiness has waited for them
        await until(client, "lost", lambda status: [r.reason for r in status.not_ready] == ["SOURCE_NOT_FOUND"])

        await stack.registry.stop()
        await stack.registry.start()
        await stack.registry.ready(SECONDS)
        await until(client, pinned, lambda status: status.target_replicas == 1)  # it still knows of the replica
        await register_content(client, pinned, world.contents[4])
        await until(client, pinned, lambda status: is_ready(status) and status.versions[0].version == 2)
        await set_residency(client, pinned, resources_pb2.Adapter.RESIDENCY_ON_DEMAND)
        await until_loaded(client, {pinned: False, preloaded: False})  # it stays until others need the room


async def test_what_cannot_get_onto_the_device_is_not_ready_in_host_memory(world: TinyWorld, tmp_path: Path) -> None:
    """Two are pinned where one has room: the other is not served, whatever host memory holds."""
    first, second = world.contents[4], world.contents[8]  # of one shape
    room = max(path.stat().st_size for path in (world.folder / "store" / first).glob("*.safetensors")) * 3 // 2
    flags = ["--replica-name=one", f"--adapter-memory={room}"]
    async with world.serving(tmp_path, *flags, names=[first, second]) as (_, client):
        for name in (first, second):
            await set_residency(client, name, resources_pb2.Adapter.RESIDENCY_PINNED)
            if name == first:
                await until(client, first, is_ready)
        await until(client, second, lambda status: [r.reason for r in status.not_ready] == ["ADAPTER_MEMORY"])
        await set_residency(client, second, resources_pb2.Adapter.RESIDENCY_PRELOAD)
        await until(client, second, is_ready)
        assert await loaded(client) == {first: True}


async def until_loaded(client: Client, wanted: dict[str, bool]) -> None:
    deadline = time.monotonic() + SECONDS
    found: Any = None
    while found != wanted:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.2)
        try:
            found = await loaded(client)
        except LoraplexError as error:
            found = error
