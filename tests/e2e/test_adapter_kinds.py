"""Adapters of every kind that PEFT saves, registered with the registry and asked for through the API, all at once and
twice: PEFT's tokens and logprobs."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client
from shared.adapter_format.served import SERVED_KINDS
from tests.e2e.streams import Collected, collect
from tests.inference_service.engine.kind_models import CASES, VOCAB, World, build, oracle_logits

pytestmark = [
    pytest.mark.slow,  # every run has tests/kinds/test_kinds.py
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore"),  # PEFT warns of what these are made of
]

BASE = "tiny"
OTHERS = ("qwen2", "qwen3")
TIE_GAP, TOLERANCE = 1e-3, 1e-4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would only wait for each other over models as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(world: World, digest: str | None, prompt: list[int], answer: Collected) -> None:
    logits = oracle_logits(world, [*prompt, *answer.token_ids], digest)[len(prompt) - 1 : -1]
    top = logits.topk(2).values
    for position, token in enumerate(answer.token_ids):
        assert token == int(logits[position].argmax()) or float(top[position, 0] - top[position, 1]) < TIE_GAP
    expected = logits.log_softmax(-1)[range(len(answer.token_ids)), answer.token_ids].tolist()
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def ask(client: Client, world: World, name: str, digest: str | None, chosen: random.Random) -> None:
    added = world.extra_vocab[digest]
    prompt = [chosen.randrange(3, VOCAB) for _ in range(chosen.choice([2, 9, 30]))] + [VOCAB + added - 1]
    stop = {"max_tokens": 8, "ignore_eos": True}
    check(world, digest, prompt, await collect(client, prompt, adapter=name, stop=stop))


@pytest.mark.parametrize(
    "family", ["llama-tied", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2", "qwen3"))]
)
async def test_all_kinds_at_once(family: str, tmp_path: Path) -> None:
    cases = [name for name, case in CASES.items() if case.kind in SERVED_KINDS and case.fits(family)]
    world = build(tmp_path / "store", family, cases)
    digests: dict[str, str | None] = dict(zip(cases, world.acquired, strict=True))
    flags = [f"--model-name={BASE}", "--dtype=float32", "--device=cpu", "--threads=1"]
    stack = Stack(tmp_path / "run", flags=flags, model=world.folder, roots={"store": tmp_path / "store"})
    async with stack, stack.client() as client:
        await wait_for_base_model(client, BASE)
        for name in cases:
            registered = await register(client, name, f"file://store/{name}", BASE)
            assert registered.version.digest == digests[name]
        chosen = random.Random(3)
        asked = [*digests.items(), *digests.items(), ("", None), ("", None)]
        chosen.shuffle(asked)
        await asyncio.gather(*(ask(client, world, name, digest, chosen) for name, digest in asked))
