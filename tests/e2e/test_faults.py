"""Bad input and dying processes, with streams running all the while: typed errors, and nobody else notices.

The traffic is greedy, so an undisturbed stream is one whose tokens equal those of a quiet run.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from examples.prompts import ADAPTERS
from examples.stack import ADAPTERS as ADAPTERS_FOLDER
from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client, LoraplexError
from loraplex.registry.v1 import registry_pb2
from tests.e2e.streams import collect

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NAMES = ["", *(a.name for a in ADAPTERS)]
PROMPT = "Once upon a time there was a small dragon who"
STOP = {"max_tokens": 32, "ignore_eos": True}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Both services; the root `store` holds copies of the examples, to be spoiled."""
    store = tmp_path / "store"
    shutil.copytree(ADAPTERS_FOLDER, store)
    async with Stack(tmp_path / "run", flags=["--max-model-len=512"], roots={"store": store}) as running:
        async with running.client() as client:
            await wait_for_base_model(client)
            for name in NAMES[1:]:
                await register(client, name, f"file://store/{name}")
        yield running


async def traffic(client: Client) -> list[list[int]]:
    """One stream of every adapter and of the base model, at once."""
    done = await asyncio.gather(*(collect(client, PROMPT, name, stop=STOP) for name in NAMES))
    assert all(answer.finished is not None for answer in done)
    return [answer.token_ids for answer in done]


async def reason_of(work: Any) -> tuple[str, str]:
    """The reason of the error that `work` ends with, and all that it says."""
    with pytest.raises(LoraplexError) as caught:
        await work
    return caught.value.reason, f"{caught.value.message} {caught.value.metadata}"


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
        "blend": (ask(request={"blend": [{"reference": "pirate", "weight": 1}]}), "UNIMPLEMENTED", "blend"),
        "deadline": (ask(timeout=0.01), "DEADLINE_EXCEEDED", ""),
    }


def spoil(store: Path) -> dict[str, tuple[str, str]]:
    """Adapter folders that must be refused: name → (reason, what the error must name)."""

    def variant(name: str, change: Callable[[Path], None]) -> Path:
        folder = store / name
        shutil.copytree(ADAPTERS_FOLDER / "pirate", folder)
        change(folder)
        return folder

    def config(**changes: Any) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return change

    def truncate(folder: Path) -> None:
        os.truncate(folder / "adapter_model.safetensors", 500_000)

    def pickle(folder: Path) -> None:
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    def not_finite(folder: Path) -> None:
        tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.full((8, 576), np.nan, "f4")}
        save_file(tensors, folder / "adapter_model.safetensors")

    variant("dora", config(use_dora=True))
    variant("unknown-key", config(frobnicate=3))
    variant("wrong-rank", config(r=4))
    variant("truncated", truncate)
    variant("pickle", pickle)
    variant("nan", not_finite)
    return {
        "dora": ("UNSUPPORTED_ADAPTER", "use_dora"),
        "unknown-key": ("UNSUPPORTED_ADAPTER", "frobnicate"),
        "wrong-rank": ("ADAPTER_INVALID", "lora_A"),
        "truncated": ("ADAPTER_INVALID", "truncated"),
        "pickle": ("UNSUPPORTED_ADAPTER", "adapter_model.bin"),
        "nan": ("ADAPTER_INVALID", "lora"),
        "missing": ("SOURCE_NOT_FOUND", "missing"),
        "../../etc": ("SOURCE_FORBIDDEN|INVALID_ARGUMENT", ""),
    }


async def test_bad_input_gets_a_typed_error_and_disturbs_nobody(stack: Stack, tmp_path: Path) -> None:
    refused = spoil(tmp_path / "store")
    async with stack.client() as client:
        quiet = await traffic(client)
        running = asyncio.ensure_future(traffic(client))
        await asyncio.sleep(0.3)
        for what, (call, reason, named) in bad_requests(client).items():
            found, text = await reason_of(call)
            assert found in (reason, "DEADLINE_UNREACHABLE") if what == "deadline" else found == reason, what
            assert named in text, what
        for name, (reason, named) in refused.items():
            found, text = await reason_of(register(client, "bad", f"file://store/{name}"))
            assert found in reason.split("|"), (name, found, text)
            assert named in text, (name, text)
        listed = await client.call(client.registry.ListAdapters(registry_pb2.ListAdaptersRequest()))
        assert sorted(a.name.rpartition("/")[2] for a in listed.adapters) == sorted(NAMES[1:])
        assert await running == quiet
        assert await traffic(client) == quiet


def flip(path: Path, bit: int) -> None:
    """Change the last number's lowest bits."""
    data = bytearray(path.read_bytes())
    data[-2] ^= bit
    path.write_bytes(data)


async def test_a_file_that_changed_since_fails_only_its_own_requests(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "late"
    shutil.copytree(ADAPTERS_FOLDER / "pirate", folder)
    async with stack.client() as client:
        quiet = await traffic(client)
        flip(folder / "adapter_model.safetensors", 1)  # or it would be the content that is resident already
        await register(client, "late", "file://store/late")
        flip(folder / "adapter_model.safetensors", 2)
        running = asyncio.ensure_future(traffic(client))
        found, _ = await reason_of(collect(client, PROMPT, "late", stop=STOP))
        assert found == "DIGEST_MISMATCH"
        assert await running == quiet


async def test_cancelled_streams_free_what_they_held(stack: Stack) -> None:
    async with stack.client() as client:
        quiet = await traffic(client)
        endless = {"max_tokens": 400, "ignore_eos": True}
        calls = [asyncio.ensure_future(collect(client, PROMPT, NAMES[i % 4], stop=endless)) for i in range(40)]
        await asyncio.sleep(1.0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert await traffic(client) == quiet


async def test_resident_adapters_serve_while_the_registry_is_away(stack: Stack) -> None:
    async with stack.client() as client:
        quiet = await traffic(client)
        assert stack.registry.process is not None
        stack.registry.process.kill()
        await stack.registry.process.wait()
        assert await traffic(client) == quiet
        found, _ = await reason_of(collect(client, PROMPT, "nobody"))
        assert found == "REGISTRY_UNAVAILABLE"
        await stack.registry.start()
        await stack.registry.ready(30)
        for _ in range(100):
            found, _ = await reason_of(collect(client, PROMPT, "nobody"))
            if found == "ADAPTER_NOT_FOUND":
                break
            await asyncio.sleep(0.2)
        assert found == "ADAPTER_NOT_FOUND"
        assert await traffic(client) == quiet


async def test_the_engine_is_started_again(stack: Stack) -> None:
    async with stack.client() as client:
        quiet = await traffic(client)
        running = asyncio.ensure_future(collect(client, PROMPT, stop={"max_tokens": 400, "ignore_eos": True}))
        await asyncio.sleep(1.0)
        assert stack.inference.process is not None
        children = psutil.Process(stack.inference.process.pid).children()
        next(c for c in children if "inference_service.engine.process" in c.cmdline()).send_signal(signal.SIGKILL)
        found, _ = await asyncio.wait_for(reason_of(running), 5)
        assert found == "ENGINE_UNAVAILABLE"
        await asyncio.sleep(0.5)
        await stack.inference.ready(60)
        assert await traffic(client) == quiet
