"""Greedy answers and logprobs of the real model equal PEFT's, alone and mixed, however the engine gets there."""

import asyncio
from pathlib import Path

import pytest

from examples.prompts import ADAPTERS, PROMPTS
from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client
from loraplex.inference.v1 import control_pb2
from tests.e2e.oracle import LOGPROB_TOLERANCE, Comparison, Oracle
from tests.e2e.streams import Collected, chat_ids, collect

NAMES = ["", *(a.name for a in ADAPTERS)]
MAX_TOKENS = 24

NO_CACHE = ["--no-prefix-caching", "--max-model-len=160"]
VARIANTS = {
    "default": [],
    "chunks of 16 and preemption": [*NO_CACHE, "--max-batched-tokens=16", "--max-num-seqs=8", "--kv-cache-memory=7MiB"],
}


async def register_all(client: Client) -> None:
    await wait_for_base_model(client)
    for adapter in ADAPTERS:
        await register(client, adapter.name, f"file://examples/{adapter.name}")


def check(oracle: Oracle, prompts: dict[str, list[int]], answers: dict[tuple[str, str], Collected]) -> None:
    found = Comparison()
    for (adapter, prompt), answer in answers.items():
        assert answer.finished is not None
        found.add(oracle.compare(prompts[prompt], answer.token_ids, answer.logprobs, adapter))
    print(f"{found.tokens} tokens, {found.ties} ties, worst logprob difference {found.worst_logprob:.1e}")
    assert not found.mismatches
    assert found.worst_logprob < LOGPROB_TOLERANCE
    assert found.ties <= max(1, found.tokens // 1000)


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "variant",
    # Chunks and preemption are compared with PEFT by the engine's own tests too, on a tiny model.
    [pytest.param(name, marks=[pytest.mark.slow] if flags else []) for name, flags in VARIANTS.items()],
)
async def test_mixed_batch_equals_peft(variant: str, oracle: Oracle, tmp_path: Path) -> None:
    async with Stack(tmp_path, flags=["--dtype=float32", *VARIANTS[variant]]) as stack, stack.client() as client:
        await register_all(client)
        prompts = {p: await chat_ids(client, p) for p in PROMPTS[: 2 if variant == "default" else 1]}
        # The oracle remembers what it scored last: the first prompt is asked again.
        wanted = [(name, prompt) for prompt in reversed(prompts) for name in NAMES]
        stop = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        results = await asyncio.gather(*(collect(client, prompts[p], name, stop=stop) for name, p in wanted))
        check(oracle, prompts, dict(zip(wanted, results, strict=True)))
        status = await client.call(client.control.GetReplicaStatus(control_pb2.GetReplicaStatusRequest()))
        assert (status.engine.preemptions > 0) == (variant != "default")
        if variant == "default":
            again = (collect(client, prompts[PROMPTS[0]], name, stop={"max_tokens": 16}) for name in NAMES)
            repeated = await asyncio.gather(*again)
            assert all(r.finished and r.finished.usage.cached_tokens >= 16 for r in repeated)
            check(oracle, prompts, {(n, PROMPTS[0]): r for n, r in zip(NAMES, repeated, strict=True)})
    assert (stack.registry.process.returncode, stack.inference.process.returncode) == (0, 0)
