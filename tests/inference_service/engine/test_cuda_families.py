"""Every family on the GPU: tokens of the plain runner in float32, with graphs, chunks, prefix cache and preemption."""

import random

import pytest
import torch

from inference_service.types import GenerateSpec, Sampling, Stop
from tests.inference_service.engine.random_models import tiny_family, two_layers_of_8b
from tests.inference_service.engine.tiny_engine import build_engine, run, same

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from inference_service.engine.cuda_runner import CudaRunner
from inference_service.engine.runner import ModelRunner

pytestmark = pytest.mark.gpu

FAMILIES = ("llama-biases", "mistral-window", "qwen2-window", "qwen3")
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.9, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}},
)


def random_ids(chosen, vocab_size, count):
    return [chosen.randrange(3, vocab_size) for _ in range(count)]


def specs_for(model, vocab_size, count=12, max_tokens=20):
    chosen, digests = random.Random(3), [None, *model.digests]
    shared = random_ids(chosen, vocab_size, 32)
    return [
        GenerateSpec(
            f"r{i}",
            shared[: chosen.choice([0, 16, 32])] + random_ids(chosen, vocab_size, chosen.choice([1, 9, 40])),
            Sampling(seed=i, n=1 + i % 2, **SAMPLINGS[i % len(SAMPLINGS)]),
            Stop(max_tokens, ignore_eos=True),
            digests[i % len(digests)],
            logprobs=0,
            arrival=float(i),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_plain_runners(tmp_path, family):
    model = tiny_family(tmp_path, family, (8, 3, 16))
    specs = specs_for(model, 61)
    expected = run(build_engine(model), specs)[0]
    host = model.host.pin_memory()
    for settings in ({}, {"kv_tokens": 224, "budget": 23, "num_seqs": 9}):
        engine = build_engine(model, runner_class=CudaRunner, device="cuda", host=host, **settings)
        engine.runner.warm_up()
        for _ in range(2):  # the second time prompts are cached
            same(run(engine, specs)[0], expected)


def test_tokens_of_two_layers_of_8b(tmp_path):
    model = two_layers_of_8b(tmp_path, (16, 8, 64), "float32")
    specs = specs_for(model, 128256)
    sizes = {"device": "cuda", "host": model.host.pin_memory(), "load_format": "dummy", "adapter_bytes": 256 << 20}
    engine = build_engine(model, runner_class=ModelRunner, **sizes)
    expected = run(engine, specs)[0]
    del engine
    for settings in ({"kv_tokens": 4096}, {"kv_tokens": 224, "budget": 40, "num_seqs": 9}):
        engine = build_engine(model, runner_class=CudaRunner, **sizes, **settings)
        engine.runner.warm_up()
        for _ in range(2):
            same(run(engine, specs)[0], expected)
        del engine
