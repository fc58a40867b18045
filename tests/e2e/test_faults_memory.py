"""No room: budgets smaller than an adapter, a full disk, every slot pinned. Who fits is served all the while."""

import asyncio
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loraplex import Client, LoraplexError
from loraplex.inference.v1 import control_pb2
from tests.e2e.processes import processes_of
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import PATIENCE_SECONDS, Traffic, ask, assert_is_of, at_last, refusal

SMALL = ("content-1", "content-6")  # 0.52 and 0.47 MB
RESIDENT = {"": "", **{name: name for name in SMALL}}


async def load(client: Client, name: str, *, pinned: bool = False) -> None:
    request = control_pb2.LoadAdapterRequest(reference=name, pinned=pinned, wait=True)
    await client.call(client.control.LoadAdapter(request))


async def unload(client: Client, name: str) -> None:
    await client.call(client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=name)))


async def lasting_refusal(attempt: Callable[[], Coroutine[Any, Any, object]]) -> LoraplexError:
    """The refusal that no retry helps against; until then, files in use may be in the way for a moment."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (error := await refusal(attempt())).retry_after is not None:
            assert error.reason == "ADAPTER_MEMORY"
            await asyncio.sleep(error.retry_after)
    assert error.reason == "ADAPTER_MEMORY"
    return error


async def test_an_adapter_larger_than_a_budget_is_refused_and_the_setting_named(
    world: TinyWorld, tmp_path: Path
) -> None:
    too_large = {"content-2": "--adapter-memory", "content-7": "--host-memory", "content-4": "--disk-bytes"}
    flags = ["--adapter-memory=1MiB", "--host-memory=1.25MiB", "--disk-bytes=1.8MB"]  # 1.08, 1.57 and 2.10 MB
    async with (
        world.serving(tmp_path / "run", *flags, names=[*SMALL, *too_large]) as (_, client),
        Traffic(world, client, RESIDENT) as traffic,
    ):
        for name, setting in too_large.items():
            pin = partial(load, client, name, pinned=True)
            for attempt in (partial(ask, client, 0, name), partial(load, client, name), pin):
                assert setting in (await lasting_refusal(attempt)).message
            await unload(client, name)
        await traffic.answers(20)


async def test_a_full_disk_refuses_what_is_not_there_until_there_is_room(world: TinyWorld, tmp_path: Path) -> None:
    """The disk is a small volume or, where none may be mounted, a limit of the adapter process's files."""
    large, run = "content-4", tmp_path / "run"
    (run / "cache").mkdir(parents=True)
    is_volume = mount(run / "cache", "size=1500k")
    try:
        async with world.serving(run, names=[*SMALL, large]) as (stack, client):
            (adapters,) = processes_of(stack, "adapters")
            async with Traffic(world, client, RESIDENT) as traffic:
                if not is_volume:
                    resource.prlimit(adapters.pid, resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
                for error in await asyncio.gather(*(refusal(ask(client, prompt, large)) for prompt in range(4))):
                    assert error.reason == "ADAPTER_MEMORY"
                    assert "--cache-dir" in error.message
                    assert error.retry_after is not None
                await traffic.answers(20)
                if is_volume:
                    assert mount(run / "cache", "remount,size=8m")
                else:
                    resource.prlimit(adapters.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                answer, seconds = await at_last(lambda: ask(client, 0, large), PATIENCE_SECONDS)
                assert_is_of(world, large, 0, answer)
                assert not list((run / "cache" / "work").glob("*/*"))
    finally:
        if is_volume:
            unmount(run / "cache")
    print(f"served {seconds:.2f} s after there was room ({'a volume' if is_volume else 'a limit'})")


def mount(folder: Path, options: str) -> bool:
    """Whether a volume in memory could be mounted."""
    if (command := shutil.which("mount")) is None:
        return False
    arguments = [command, "-t", "tmpfs", "-o", options, "tmpfs", folder]
    return subprocess.run(arguments, check=False, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow  # a default run asks the engine process alone, in its own tests
@pytest.mark.parametrize("flag", ["--max-adapters=2", "--adapter-memory=1MiB"])
async def test_when_all_is_pinned_others_are_told_so_and_served_after_an_unload(
    world: TinyWorld, tmp_path: Path, flag: str
) -> None:
    others = ["content-5", "content-9"]
    async with world.serving(tmp_path / "run", flag, names=[*SMALL, *others]) as (_, client):
        for name in SMALL:
            await load(client, name, pinned=True)
        async with Traffic(world, client, RESIDENT) as traffic:
            calls = [ask(client, prompt, name) for prompt in range(4) for name in others]
            started = time.monotonic()
            for error in await asyncio.gather(*map(refusal, [*calls, load(client, others[0], pinned=True)])):
                assert error.reason == "ADAPTER_MEMORY"
                assert "pinned" in error.message
                assert "loraplex adapter unload NAME" in error.message
                assert error.retry_after is not None
            seconds_until_told = time.monotonic() - started
            await traffic.answers(12)
        async with Traffic(world, client, {"": "", SMALL[0]: SMALL[0]}):
            await unload(client, others[0])  # nor does it want its pin any more
            await unload(client, SMALL[1])
            for name in others:
                assert_is_of(world, name, 0, await ask(client, 0, name))
            for error in await asyncio.gather(refusal(load(client, "nobody", pinned=True))):
                assert error.reason == "ADAPTER_NOT_FOUND"
    print(f"told within {seconds_until_told:.2f} s")


async def test_what_only_the_device_holds_is_served_without_its_source(world: TinyWorld, tmp_path: Path) -> None:
    first, *others = "content-1", "content-5", "content-9"  # 0.52 MB each: the other tiers hold two
    async with world.serving(tmp_path / "run", "--host-memory=1.1MiB", "--disk-bytes=1.1MB") as (_, client):
        folder = world.copy(first, tmp_path / "run")
        await register_content(client, first, first, "copies")
        for name in others:
            await register_content(client, name, name)
        for name in (first, *others):
            await load(client, name)
        shutil.rmtree(folder)
        async with Traffic(world, client, {"": "", first: first}) as traffic:
            await traffic.answers(20)
