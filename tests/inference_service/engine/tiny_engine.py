"""The tiny model with its adapters in an engine of this process, and requests for it."""

import random
import time

import pytest
import torch

from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import EngineConfig
from inference_service.engine.engine import Engine
from inference_service.engine.runner import ModelRunner, kv_bytes_per_token
from inference_service.engine.scheduler import Scheduler
from inference_service.lora.pool import AdapterPool
from inference_service.lora.slots import SlotTable
from inference_service.model.loader import load_config
from inference_service.types import GenerateSpec, Sampling, Stop
from tests.inference_service.engine.tiny_model import ADAPTERS, VOCAB

API = b"api-0"
DIGESTS = [None, *ADAPTERS]


def build_engine(
    tiny, *, kv_tokens=2048, budget=64, num_seqs=16, prefix_caching=True, block_size=16, slots=8,
    runner_class=ModelRunner, device="cpu", host=None, dtype="float32", load_format="safetensors",
    adapter_bytes=1 << 18,
):  # fmt: skip
    """An engine over the tiny model; `host`: its adapters' blobs where the runner can read them."""
    bytes_per_token = kv_bytes_per_token(load_config(tiny.folder)[1], getattr(torch, dtype))
    asked = []
    config = EngineConfig(
        model=str(tiny.folder), load_format=load_format, device=device, dtype=dtype, block_size=block_size,
        max_num_seqs=num_seqs,
        kv_cache_bytes=kv_tokens * bytes_per_token, max_batched_tokens=budget, prefix_caching=prefix_caching,
        adapter_memory_bytes=adapter_bytes, max_adapters=slots,
    )  # fmt: skip
    runner = runner_class(config, tiny.host if host is None else host)
    pool = AdapterPool(
        SlotTable(slots, runner.arena_bytes), runner.arena, lambda digest: asked.append(digest), lambda digest: None,
        time.monotonic,
    )  # fmt: skip
    blocks = BlockAllocator(runner.num_blocks, block_size, prefix_caching)
    engine = Engine(runner, Scheduler(runner.limits, blocks, pool), "weights")
    engine.answer_adapters = lambda: [pool.on_acquired(tiny.acquired[asked.pop(0)]) for _ in tuple(asked)]
    return engine


def run(engine, specs):
    """Every sequence's (tokens, logprobs) by (request, index), and prompt logprobs by request."""
    for spec in specs:
        engine.submit(API, spec)
    answers, scores = {}, {}
    for _ in range(3000):
        engine.answer_adapters()
        engine.scheduler.adapters.poll()
        for output in engine.step(time.monotonic()).values():
            assert not output.failed, output.failed
            for delta in output.deltas:
                tokens, logprobs = answers.setdefault((delta.request_id, delta.index), ([], []))
                tokens += delta.token_ids
                logprobs += [entry.logprob for entry in delta.logprobs or ()]
            scores.update({p.request_id: p.tokens for p in output.prompt_logprobs})
        engine.scheduler.check_integrity()
        if not engine.scheduler.has_work:
            engine.scheduler.adapters.check_integrity()
            return answers, scores
    raise AssertionError("still busy")


def requests(count=8, max_tokens=24, **sampling):
    chosen = random.Random(5)
    options = {"temperature": 0.0, **sampling}
    return [
        GenerateSpec(
            f"r{i}",
            [chosen.randrange(3, VOCAB) for _ in range(chosen.choice([1, 7, 16, 33, 40]))],
            Sampling(**{"seed": i, **options}),
            Stop(max_tokens, ignore_eos=True),
            adapter_digest=DIGESTS[i % len(DIGESTS)],
            logprobs=0,
            arrival=float(i),
        )
        for i in range(count)
    ]


def same(got, expected):
    assert {key: tokens for key, (tokens, _) in got.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, logprobs) in got.items():
        assert logprobs == pytest.approx(expected[key][1], abs=1e-4)
