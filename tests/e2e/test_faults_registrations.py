"""Bad adapters between good ones, all registered under load: each bad one is told why, each good one serves."""

import asyncio
import shutil
from itertools import zip_longest
from pathlib import Path

from loraplex import Client
from loraplex.registry.v1 import registry_pb2
from tests.e2e.invalid_adapters import INVALID
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, refusal

AT_ONCE = 6
RESIDENT = {"": "", "content-0": "content-0"}


async def test_invalid_adapters_between_valid_ones(world: TinyWorld, tmp_path: Path) -> None:
    valid = list(world.contents[1:26])
    assert len(valid) == len(INVALID) == 25
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(client: Client, name: str) -> None:
        async with turn:
            if name in INVALID:
                await is_refused(client, name)
            else:
                await register_content(client, name, name)
                for prompt in (0, 3):
                    assert_is_of(world, name, prompt, await ask(client, prompt, name))

    async def is_refused(client: Client, name: str) -> None:
        _, reason, named = INVALID[name]
        error = await refusal(register_content(client, name, name, "copies"))
        assert error.reason in reason.split("|"), (name, error.summary)
        assert named in f"{error.message} {error.metadata}", (name, error.summary)
        assert (await refusal(ask(client, 0, name))).reason == "ADAPTER_NOT_FOUND"

    flags = ["--adapter-memory=8MiB", "--host-memory=16MiB"]
    async with world.serving(tmp_path / "run", *flags, names=["content-0"]) as (_, client):
        for name, (spoil, _, _) in INVALID.items():
            folder = tmp_path / "run" / "copies" / name
            shutil.copytree(world.folder / "store" / "content-8", folder)
            spoil(folder)
        async with Traffic(world, client, RESIDENT):
            names = [name for pair in zip_longest(INVALID, valid) for name in pair]
            await asyncio.gather(*(one(client, name) for name in names))
        listed = await client.call(client.registry.ListAdapters(registry_pb2.ListAdaptersRequest(page_size=100)))
        assert {adapter.name.rpartition("/")[2] for adapter in listed.adapters} == {"content-0", *valid}
