"""Bad requests and cancelled ones, with streams running all the while: typed errors, and nobody else notices.

The traffic is greedy, so an undisturbed stream is one whose tokens equal those of a quiet run.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from examples.prompts import ADAPTERS
from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client
from loraplex.inference.v1 import control_pb2
from tests.e2e.streams import collect
from tests.e2e.traffic import refusal

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

NAMES = ["", *(a.name for a in ADAPTERS)]
PROMPT = "Once upon a time there was a small dragon who"
STOP = {"max_tokens": 32, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    stack = Stack(tmp_path_factory.mktemp("requests"), flags=["--max-model-len=512"])
    async with stack, stack.client() as client:
        await wait_for_base_model(client)
        for name in NAMES[1:]:
            await register(client, name, f"file://examples/{name}")
        yield client


async def traffic(client: Client) -> list[list[int]]:
    """One stream of every adapter and of the base model, at once."""
    done = await asyncio.gather(*(collect(client, PROMPT, name, stop=STOP) for name in NAMES))
    assert all(answer.finished is not None for answer in done)
    return [answer.token_ids for answer in done]


def bad_requests(client: Client) -> dict[str, tuple[Any, str, str]]:
    """Requests by what is wrong with them: the call, the reason it must end with, and what the error must name."""

    def ask(prompt: Any = PROMPT, adapter: str = "", **more: Any) -> Any:
        return collect(client, prompt, adapter, **more)

    return {
        "unknown adapter": (ask(adapter="nobody"), "ADAPTER_NOT_FOUND", "nobody"),
        "unknown version": (ask(adapter="pirate@7"), "ADAPTER_NOT_FOUND", "7"),
        "unknown alias": (ask(adapter="pirate@prod"), "ADAPTER_NOT_FOUND", "prod"),
        "not a reference": (ask(adapter="Pirate!"), "INVALID_ARGUMENT", "adapter"),
        "empty prompt": (ask(""), "INVALID_ARGUMENT", "prompt"),
        "prompt too long": (ask([5] * 600), "INVALID_ARGUMENT", "prompt"),
        "unknown token": (ask([10**6]), "INVALID_ARGUMENT", "prompt.token_ids"),
        "negative temperature": (ask(temperature=-1), "INVALID_ARGUMENT", "sampling.temperature"),
        "NaN": (ask(top_p=float("nan")), "INVALID_ARGUMENT", "sampling.top_p"),
        "n too large": (ask(n=10_000), "INVALID_ARGUMENT", "sampling.n"),
        "empty stop string": (ask(stop={"strings": [""]}), "INVALID_ARGUMENT", "stop.strings"),
        "blend": (ask(request={"blend": [{"reference": "pirate"}]}), "INVALID_ARGUMENT", "blend[0].weight"),
        "deadline": (ask(timeout=0.01), "DEADLINE_EXCEEDED|DEADLINE_UNREACHABLE", ""),
    }


async def test_bad_requests_get_a_typed_error_and_disturb_nobody(client: Client) -> None:
    quiet = await traffic(client)
    running = asyncio.ensure_future(traffic(client))
    await asyncio.sleep(0.3)
    for what, (call, reason, named) in bad_requests(client).items():
        error = await refusal(call)
        assert error.reason in reason.split("|"), what
        assert named in f"{error.message} {error.metadata}", what
    assert await running == quiet
    assert await traffic(client) == quiet


async def test_cancelled_streams_free_what_they_held(client: Client) -> None:
    quiet = await traffic(client)
    endless = {"max_tokens": 400, "ignore_eos": True}
    calls = [asyncio.ensure_future(collect(client, PROMPT, NAMES[i % 4], stop=endless)) for i in range(40)]
    await asyncio.sleep(1.0)
    assert await num_active(client)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    async with asyncio.timeout(5):
        while await num_active(client):  # noqa: ASYNC110 - it is another process that ends them
            await asyncio.sleep(0.05)
    assert await traffic(client) == quiet


async def num_active(client: Client) -> int:
    """Requests that hold an adapter."""
    listed = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
    return sum(adapter.active_requests for adapter in listed.adapters)
