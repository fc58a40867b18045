"""Deaths one after another, of every process, while adapters that fit in no tier come and go."""

import asyncio
import random
from pathlib import Path
from typing import Literal

import pytest

from loraplex.inference.v1 import control_pb2
from tests.e2e.processes import Role, kill, processes_of
from tests.e2e.tiny_stack import TinyWorld
from tests.e2e.traffic import Traffic, ask

DEATHS: list[Role | Literal["registry"]] = ["adapters", "engine", "api", "registry"] * 4
# With which a request may end whose process died. A deadline is none of them: nothing hangs.
DIED = {"ENGINE_UNAVAILABLE", "SOURCE_UNAVAILABLE", "REGISTRY_UNAVAILABLE", "UNAVAILABLE"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_after_a_storm_of_deaths_all_is_well(world: TinyWorld, tmp_path: Path) -> None:
    memory = ["--max-adapters=5", "--adapter-memory=6MiB", "--host-memory=9MiB", "--disk-bytes=12MB"]
    chance = random.Random(1)
    deaths = chance.sample(DEATHS, len(DEATHS))
    async with world.serving(tmp_path / "run", *memory, "--api-processes=2", names=world.contents) as (stack, client):
        for name in world.contents:
            await ask(client, 0, name, tokens=1)
        everything = {"": "", **{name: name for name in world.contents}}
        async with Traffic(world, client, everything, lines=8, tolerated=DIED) as traffic:
            for who in deaths:
                await asyncio.sleep(chance.random())
                if who == "registry":
                    assert stack.registry.process is not None
                    stack.registry.process.kill()
                    await stack.registry.process.wait()
                    await asyncio.sleep(chance.random())
                    await stack.registry.start()
                    await stack.registry.ready(30)
                else:
                    kill(chance.choice(processes_of(stack, who)))
                    await asyncio.sleep(0.2)
                    await stack.inference.ready(60)
                await traffic.answers(4)
            await traffic.answers(len(everything))
            failed = traffic.failed.copy()
            await traffic.answers(2 * len(everything))
            assert traffic.failed == failed, "requests failed after the last death"
        listed = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
        assert not any(adapter.active_requests for adapter in listed.adapters)
        for name in world.contents:
            await client.call(client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=name)))
        listed = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
        assert all(adapter.level == control_pb2.LoadedAdapter.LEVEL_DISK for adapter in listed.adapters)
