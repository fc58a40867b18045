"""The GPU's runner with adapters of every served kind: launched ahead, staged, sampled on the device.

Its steps with extras are PyTorch's alone, so that they run on a CPU too, over kernels' references: only what CUDA
itself provides is replaced here. The same requests run on a GPU where there is one.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inference_service.engine.cuda_runner import CudaRunner
from inference_service.types import Acquired, GenerateSpec, Sampling, Stop
from shared.adapter_format.served import SERVED_KINDS
from tests.inference_service.engine.kind_models import CASES, VOCAB, World, build
from tests.inference_service.engine.test_kinds import check, requests
from tests.inference_service.engine.tiny_engine import build_engine, run

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what these adapters are made of

SETTINGS: dict[str, Any] = {"budget": 64, "num_seqs": 64, "slots": 64, "adapter_bytes": 8 << 20, "kv_tokens": 8192}
FEW: dict[str, Any] = {"budget": 24, "num_seqs": 16, "slots": 20, "adapter_bytes": 8 << 20, "kv_tokens": 8192}
SAMPLINGS = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {9: 2.0, 30: -100.0}},
]


class Event:
    """Of a device that has done everything when it is asked to."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PlainCudaRunner(CudaRunner):
    """Takes the path of steps with extras for all steps: the others need Triton."""

    def _forward(self, schedule, adjusted):
        return self._forward_plain(schedule, adjusted)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More would only wait for each other over models as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen2", "qwen2-tied"])
def world(request, tmp_path_factory, one_thread) -> World:
    cases = [name for name, case in CASES.items() if case.kind in SERVED_KINDS]
    return build(tmp_path_factory.mktemp(request.param), request.param, cases)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def unpinned(*shape, pin_memory=False, **options):
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def sampled_requests(world: World, options: dict[str, Any]) -> list[GenerateSpec]:
    """Of all adapters, each with another number of tokens, so that batches change."""
    chosen = random.Random(1)
    specs = []
    for number, digest in enumerate([None, *world.acquired, None, *world.acquired]):
        added = world.extra_vocab[digest]
        prompt = [chosen.randrange(3, VOCAB) for _ in range(chosen.choice([1, 9, 22]))] + [VOCAB + added - 1]
        bias = {VOCAB: 3.0} if added and "logit_bias" in options else {}
        sampling = Sampling(seed=number, **{**options, "logit_bias": {**options.get("logit_bias", {}), **bias}})
        stop = Stop(3 + number % 4, min_tokens=2)
        specs.append(GenerateSpec(f"r{number}", prompt, sampling, stop, digest, logprobs=1, extra_vocab=added))
    return specs


def tokens_of(answers: dict[tuple[str, int], tuple[list[int], list[float]]]) -> dict[tuple[str, int], list[int]]:
    return {key: tokens for key, (tokens, _) in answers.items()}


@pytest.mark.parametrize("settings", [SETTINGS, FEW], ids=["many", "few"])
def test_greedy_answers_are_pefts(world: World, no_cuda: None, settings: dict[str, Any]) -> None:
    specs = requests(world, 2)
    answers, scores = run(build_engine(world, runner_class=PlainCudaRunner, **settings), specs)
    _, expected = run(build_engine(world, **settings), specs)
    for spec in specs:
        check(world, spec, *answers[spec.request_id, 0])
    assert scores.keys() == expected.keys()
    for name, entries in scores.items():
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in expected[name]], abs=1e-4)


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_sampled_tokens_are_the_plain_runners(world: World, no_cuda: None, options: dict[str, Any]) -> None:
    specs = sampled_requests(world, options)
    answers, _ = run(build_engine(world, runner_class=PlainCudaRunner, **SETTINGS), specs)
    expected, _ = run(build_engine(world, **SETTINGS), specs)
    assert {key: tokens for key, (tokens, _) in answers.items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(world: World) -> None:
    host = world.host.pin_memory()
    engine = build_engine(world, runner_class=CudaRunner, device="cuda", host=host, **SETTINGS)
    engine.runner.warm_up()
    specs = requests(world, 5)
    answers, _ = run(engine, specs)
    for spec in specs:
        check(world, spec, *answers[spec.request_id, 0])
    sampled = sampled_requests(world, SAMPLINGS[2])
    expected, _ = run(build_engine(world, **SETTINGS), sampled)
    answers, _ = run(engine, sampled)
    assert {key: tokens for key, (tokens, _) in answers.items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gains_and_offsets_take_the_kernels_way_on_a_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(world, runner_class=CudaRunner, device="cuda", host=world.host.pin_memory(), **SETTINGS)
    engine.runner.warm_up()
    monkeypatch.setattr(CudaRunner, "_forward_plain", None)
    known = [None, *(digest for digest, acquired in world.acquired.items() if known_to_kernels(acquired))]
    specs = [spec for spec in requests(world, 6) if spec.adapter_digest in known]
    assert len(specs) > 8
    for _ in range(2):
        answers, _ = run(engine, specs)
        for spec in specs:
            check(world, spec, *answers[spec.request_id, 0])


def known_to_kernels(acquired: Acquired) -> bool:
    layout = acquired.layout
    return not layout.extra_vocab and {extra.name for extra in layout.extras} <= {"gain", "offset"}
