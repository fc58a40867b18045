"""Fused kernels, captured graphs and steps launched ahead give what the plain runner gives, in float32 on a GPU."""

import pytest
import torch

from tests.inference_service.engine.tiny_engine import build_engine, requests, run, same
from tests.inference_service.engine.tiny_model import build_tiny

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from inference_service.engine.cuda_runner import CudaRunner

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

SETTINGS = {
    "default": {},
    "chunks": {"budget": 17, "num_seqs": 7},
    "no prefix cache": {"prefix_caching": False},
    "preemption": {"kv_tokens": 192},
    "one slot": {"slots": 1},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def fused(tiny, **settings):
    engine = build_engine(tiny, runner_class=CudaRunner, device="cuda", host=tiny.host.pin_memory(), **settings)
    engine.runner.warm_up()
    return engine


@pytest.fixture(scope="module")
def plain(tiny):
    return run(build_engine(tiny), requests(12))


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_and_logprobs_are_the_plain_runners(tiny, plain, setting):
    engine = fused(tiny, **SETTINGS[setting])
    same(run(engine, requests(12))[0], plain[0])
    same(run(engine, requests(12))[0], plain[0])  # what is cached now is the same


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05},
     {"n": 3},
     {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5}],
    ids=str,
)  # fmt: skip
def test_sampled_tokens_are_the_plain_runners(tiny, sampling):
    expected = run(build_engine(tiny), requests(8, **sampling))[0]
    same(run(fused(tiny), requests(8, **sampling))[0], expected)


def test_nothing_is_allocated_after_the_warm_up(tiny):
    engine = fused(tiny)
    run(engine, requests(16))
    before = torch.cuda.memory_stats()["num_device_alloc"]
    run(engine, requests(16, temperature=0.7, top_p=0.9))
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
