"""Adapters change while requests run: those end on the weights they began with, new ones get the new ones at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.prompts import ADAPTERS
from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client
from loraplex.registry.v1 import registry_pb2
from shared.errors import AdapterNotFound
from tests.e2e.streams import Collected, collect

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

FIRST, SECOND = (f"file://examples/{a.name}" for a in ADAPTERS[:2])
PROMPT = "Once upon a time there was a small dragon who"
LONG, SHORT = {"max_tokens": 160, "ignore_eos": True}, {"max_tokens": 16, "ignore_eos": True}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """Of both services. `first` and `second` have the weights that `style` will have."""
    async with Stack(tmp_path, flags=["--dtype=float32", "--max-model-len=512"]) as stack, stack.client() as client:
        await wait_for_base_model(client)
        await register(client, "first", FIRST)
        await register(client, "second", SECOND)
        yield client


async def ask(client: Client, adapter: str, stop: dict[str, object]) -> Collected:
    return await collect(client, PROMPT, adapter, stop=stop)


def version_of(answer: Collected) -> str:
    assert answer.started is not None
    return answer.started.adapter_version.rpartition("/")[2]


async def until_version(client: Client, adapter: str, version: str) -> str:
    """How long it takes until a new request means the version; each one before that means the one before."""
    began = asked = time.monotonic()
    while (found := version_of(await ask(client, adapter, {"max_tokens": 1}))) != version:
        assert int(found) == int(version) - 1
        asked = time.monotonic()
        assert asked - began < 30
    return f"a request sent {1e3 * (asked - began):.0f} ms later meant it, answered within {1e3 * _since(asked):.0f} ms"


def _since(moment: float) -> float:
    return time.monotonic() - moment


async def is_served(client: Client, adapter: str) -> bool:
    try:
        await ask(client, adapter, {"max_tokens": 1})
    except AdapterNotFound:
        return False
    return True


async def test_a_new_version_under_running_requests(client: Client) -> None:
    quiet = {name: await ask(client, name, LONG) for name in ("first", "second")}
    assert quiet["first"].token_ids != quiet["second"].token_ids
    await register(client, "style", FIRST, aliases=["prod"])
    running = [asyncio.ensure_future(ask(client, name, LONG)) for name in ("style", "style@prod", "style@1")]
    await asyncio.sleep(0.5)
    registered = await register(client, "style", SECOND)
    print(f"a new version: {await until_version(client, 'style', '2')}")
    assert version_of(await ask(client, "style@prod", SHORT)) == "1"
    assert not any(request.done() for request in running)

    alias = registry_pb2.SetAdapterAliasRequest(name="style@prod", targets=[{"version": 2}])
    await client.call(client.registry.SetAdapterAlias(alias))
    print(f"a moved alias: {await until_version(client, 'style@prod', '2')}")

    for answer in await asyncio.gather(*running):
        assert version_of(answer) == "1"
        assert answer.token_ids == quiet["first"].token_ids
    for name, number in (("style", "2"), ("style@prod", "2"), ("style@1", "1")):
        answer = await ask(client, name, LONG)
        assert version_of(answer) == number
        assert answer.token_ids == quiet["second" if number == "2" else "first"].token_ids
    found = await ask(client, "style", SHORT)
    assert found.started is not None
    assert found.started.adapter_digest == registered.version.digest


async def test_a_deleted_adapter_under_running_requests(client: Client) -> None:
    quiet = await ask(client, "first", LONG)
    await register(client, "style", FIRST)
    assert version_of(await ask(client, "style", SHORT)) == "1"
    running = asyncio.ensure_future(ask(client, "style", LONG))
    await asyncio.sleep(0.3)
    await client.call(client.registry.DeleteAdapter(registry_pb2.DeleteAdapterRequest(name="style")))
    began = time.monotonic()
    while await is_served(client, "style"):
        assert _since(began) < 30
    print(f"a deleted adapter was refused {1e3 * _since(began):.0f} ms after it was deleted")
    assert not running.done()
    assert (await running).token_ids == quiet.token_ids
    await client.call(client.registry.UndeleteAdapter(registry_pb2.UndeleteAdapterRequest(name="style")))
    began = time.monotonic()
    while not await is_served(client, "style"):
        assert _since(began) < 30
    print(f"an undeleted one answered {1e3 * _since(began):.0f} ms after it was undeleted")
    assert (await ask(client, "style", SHORT)).token_ids == quiet.token_ids[:16]
