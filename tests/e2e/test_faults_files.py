"""Files that change, vanish or break after they were registered, at the source and in the cache, under load."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from loraplex import Client
from loraplex.inference.v1 import control_pb2
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, at_last, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
REPAIR_SECONDS = 60.0


class Replica(NamedTuple):
    """A client of the running services, and their folder."""

    client: Client
    run: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    run = tmp_path_factory.mktemp("files")
    async with world.serving(run, names=["content-0", "content-1"]) as (_, client):
        yield Replica(client, run)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def lead_outside(path: Path) -> None:
    outside = path.rename(path.parents[2] / f"outside-{path.parent.name}")
    path.symlink_to(outside)


# What happens to an adapter's folder, and the error of whoever asks for the adapter then.
AT_THE_SOURCE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the weights": (lambda folder: flip_a_bit(folder / WEIGHTS), "DIGEST_MISMATCH"),
    "truncated": (lambda folder: os.truncate(folder / WEIGHTS, 100_000), "DIGEST_MISMATCH"),
    "empty": (lambda folder: os.truncate(folder / WEIGHTS, 0), "DIGEST_MISMATCH"),
    "longer": (lambda folder: os.truncate(folder / WEIGHTS, 8 << 20), "DIGEST_MISMATCH"),
    "another's weights": (
        lambda folder: shutil.copy(folder.parents[2] / "other.safetensors", folder / WEIGHTS),
        "DIGEST_MISMATCH",
    ),
    "another config": (
        lambda folder: (folder / CONFIG).write_text((folder / CONFIG).read_text() + " "),
        "DIGEST_MISMATCH",
    ),
    "weights gone": (lambda folder: (folder / WEIGHTS).unlink(), "SOURCE_NOT_FOUND"),
    "config gone": (lambda folder: (folder / CONFIG).unlink(), "SOURCE_NOT_FOUND"),
    "all gone": (shutil.rmtree, "SOURCE_NOT_FOUND"),
    "a FIFO": (lambda folder: put_a_fifo(folder / WEIGHTS), "SOURCE_FORBIDDEN"),
    "a folder": (lambda folder: put_a_folder(folder / WEIGHTS), "SOURCE_FORBIDDEN"),
    "a link that leads outside": (lambda folder: lead_outside(folder / WEIGHTS), "SOURCE_FORBIDDEN"),
}


async def test_a_source_that_changed_fails_its_own_requests_until_it_is_repaired(
    world: TinyWorld, replica: Replica
) -> None:
    client, run = replica
    shutil.copy(world.folder / "store" / "content-0" / WEIGHTS, run.parent / "other.safetensors")

    async def suffer(content: str, what: str) -> float:
        change, reason = AT_THE_SOURCE[what]
        folder = world.copy(content, run)
        await register_content(client, content, content, "copies")
        change(folder)
        errors = await asyncio.gather(*(refusal(ask(client, n % 4, content)) for n in range(6)))
        for error in errors:
            assert error.reason == reason, what
            assert error.metadata["uri"] == f"file://copies/{content}", what
            assert error.retry_after is None, what
        shutil.rmtree(folder, ignore_errors=True)
        world.copy(content, run)
        assert (await refusal(ask(client, 0, content))).reason == reason, f"{what}: not remembered"
        answer, seconds = await at_last(lambda: ask(client, 0, content), REPAIR_SECONDS)
        assert_is_of(world, content, 0, answer)
        return seconds

    async with Traffic(world, client, RESIDENT) as traffic:
        contents = world.contents[2:]
        seconds = await asyncio.gather(*(suffer(*pair) for pair in zip(contents, AT_THE_SOURCE, strict=False)))
        await traffic.answers(8)
    print(f"answered {min(seconds):.1f} to {max(seconds):.1f} s after the repair")


def _in_place_of(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


IN_THE_CACHE: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip_a_bit(folder / WEIGHTS),
    "a bit of the config": lambda folder: flip_a_bit(folder / CONFIG),
    "truncated": lambda folder: os.truncate(folder / WEIGHTS, 100_000),
    "weights gone": lambda folder: (folder / WEIGHTS).unlink(),
    "all gone": shutil.rmtree,
    "a file in the folder's place": _in_place_of,
    "a FIFO": lambda folder: put_a_fifo(folder / WEIGHTS),
    "a folder in the weights' place": lambda folder: put_a_folder(folder / WEIGHTS),
    "a file too many": lambda folder: (folder / "more").write_text("more"),
}


async def test_a_damaged_cache_is_filled_again(world: TinyWorld, replica: Replica) -> None:
    client, run = replica

    async def suffer(content: str, what: str) -> None:
        digest = (await register_content(client, content, content)).version.digest
        for prompt in range(2):
            assert_is_of(world, content, prompt, await ask(client, prompt, content))
            await client.call(client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=content)))
            IN_THE_CACHE[what](run / "cache" / "sha256" / digest.removeprefix("sha256:"))
        assert_is_of(world, content, 2, await ask(client, 2, content))

    async with Traffic(world, client, RESIDENT):
        contents = world.contents[len(AT_THE_SOURCE) + 2 :]
        await asyncio.gather(*(suffer(*pair) for pair in zip(contents, IN_THE_CACHE, strict=False)))


async def test_what_is_neither_cached_nor_at_its_source_is_refused_until_it_is_back(
    world: TinyWorld, replica: Replica
) -> None:
    """It has been here before, so only the load by the engine finds out."""
    client, run = replica
    content = world.contents[-2]
    folder = world.copy(content, run)
    digest = (await register_content(client, content, content, "copies")).version.digest
    cached = run / "cache" / "sha256" / digest.removeprefix("sha256:")
    async with Traffic(world, client, RESIDENT) as traffic:
        for damage, reason in ((shutil.rmtree, "SOURCE_NOT_FOUND"), (_flip_weights, "DIGEST_MISMATCH")):
            assert_is_of(world, content, 0, await ask(client, 0, content))
            await client.call(client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=content)))
            damage(folder)
            damage(cached)
            for error in await asyncio.gather(*(refusal(ask(client, prompt, content)) for prompt in range(4))):
                assert error.reason == reason
                assert error.retry_after is None
            shutil.rmtree(folder, ignore_errors=True)
            world.copy(content, run)
            answer, seconds = await at_last(partial(ask, client, 1, content), REPAIR_SECONDS)
            assert_is_of(world, content, 1, answer)
            print(f"{reason}: answered {seconds:.1f} s after the repair")
        await traffic.answers(8)


def _flip_weights(folder: Path) -> None:
    flip_a_bit(folder / WEIGHTS)


async def test_neither_cache_nor_source_matters_to_what_is_resident(world: TinyWorld, replica: Replica) -> None:
    client, run = replica
    content = world.contents[-1]
    folder = world.copy(content, run)
    await register_content(client, content, content, "copies")
    await ask(client, 0, content)
    async with Traffic(world, client, RESIDENT | {content: content}) as traffic:
        shutil.rmtree(folder)
        for cached in (run / "cache" / "sha256").iterdir():
            shutil.rmtree(cached)
        await traffic.answers(20)
