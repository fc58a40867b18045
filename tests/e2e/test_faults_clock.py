"""The wall clock of every process jumps, forwards and back, under load."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from examples.stack import Stack
from loraplex import Client
from loraplex.registry.v1 import registry_pb2
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, at_last, long_streams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the clock is shifted by a library that must be compiled"),
]

SOURCE = Path(__file__).with_name("shifted_clock.c")
RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
HOUR, DAY = 3600, 86_400
JUMPS = {"an hour ahead": HOUR, "a day back": HOUR - DAY, "two days ahead": HOUR + DAY, "to the right time": 0}
SECONDS = 60.0


class Clock:
    """The wall clock of processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "shifted_clock.so", folder / "shift"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """It is ahead of the right time by this from now on."""
        descriptor = os.open(self._file, os.O_WRONLY)  # in place: it is mapped
        os.pwrite(descriptor, seconds.to_bytes(8, "little", signed=True), 0)
        os.close(descriptor)


async def num_replicas(client: Client) -> int:
    replicas = await client.call(client.registry.ListReplicas(registry_pb2.ListReplicasRequest()))
    return len(replicas.replicas)


async def until_reported(client: Client) -> float:
    """Seconds until the registry counts the replica as living."""
    started = time.monotonic()
    while not await num_replicas(client):
        assert time.monotonic() < started + SECONDS
    return time.monotonic() - started


async def test_a_clock_that_jumps(world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    async with world.serving(tmp_path / "run", names=["content-0", "content-1"]) as (stack, client):
        async with Traffic(world, client, RESIDENT) as traffic:
            for number, (where, seconds) in enumerate(JUMPS.items()):
                streams = await long_streams(client, RESIDENT)
                clock.jump(seconds)
                await traffic.answers(12)
                for stream in streams:
                    await stream.check(world)
                until_switched = await _new_versions(world, client, number)
                await until_reported(client)
                print(f"{where}: a new version answers after {until_switched:.2f} s")
        await _is_shifted(stack, client, clock)


async def _new_versions(world: TinyWorld, client: Client, number: int) -> float:
    """A new version is registered and means what the name means from then on; seconds until it does."""
    content = world.contents[2 + number]
    version = (await register_content(client, "moving", content)).version.name
    started = time.monotonic()
    while (answer := await ask(client, 0, "moving")).started is None or answer.started.adapter_version != version:
        assert time.monotonic() < started + SECONDS
    assert_is_of(world, content, 0, answer)
    return time.monotonic() - started


async def _is_shifted(stack: Stack, client: Client, clock: Clock) -> None:
    """The registry really has another time than we."""
    clock.jump(DAY)
    request = registry_pb2.SetAdapterAliasRequest(
        name="namespaces/default/adapters/moving/aliases/last", targets=[{"version": 1}]
    )
    adapter, _ = await at_last(lambda: client.call(client.registry.SetAdapterAlias(request)), SECONDS)
    assert adapter.adapter.update_time.seconds > time.time() + DAY / 2
    clock.jump(0)
