"""The GPU's steps, padded to the kinds that are captured, give what the plain runner gives.

All but the capture runs on a CPU, over kernels' references: what a graph would replay is computed instead.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.engine.cuda_runner import CudaRunner
from inference_service.engine.device_batch import num_chunks
from inference_service.engine.graphs import StepGraphs
from inference_service.engine.step import Chunk, Schedule
from inference_service.engine.step_kinds import Kind
from inference_service.engine.warm_up import _run_heaviest
from inference_service.types import MAX_LOGPROBS, GenerateSpec, Sampling, Stop
from kernels.table import MAX_RANK
from tests.inference_service.engine.kind_models import CASES, build
from tests.inference_service.engine.test_kinds import check
from tests.inference_service.engine.test_kinds import requests as kinds_requests
from tests.inference_service.engine.tiny_engine import DIGESTS, build_engine, requests, run, same
from tests.inference_service.engine.tiny_model import VOCAB, Tiny, build_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what these adapters are made of


class Event:
    """Of a device that has done everything when it is asked to."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Steps(StepGraphs):
    """Computes where a graph would be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[Kind, Callable[[], Tensor]] = {}
        self.replayed: Counter[Kind] = Counter()

    def __contains__(self, kind: Kind) -> bool:
        return kind in self.steps

    def capture(self, kind: Kind, step: Callable[[], Tensor]) -> None:
        self.steps[kind] = step

    def replay(self, kind: Kind) -> Tensor:
        self.replayed[kind] += 1
        return self.steps[kind]()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def padding(tiny: Tiny, **settings: Any) -> Any:
    """An engine whose steps are padded."""
    engine = build_engine(tiny, runner_class=CudaRunner, **settings)
    engine.runner.graphs = Steps()
    with torch.inference_mode():
        engine.runner.stage_nothing()
        engine.runner.capture_graphs()
        for kind in engine.runner.kinds.captured():  # what is padding alone harms nobody
            engine.runner.compute(kind, 1)
    return engine


@pytest.mark.parametrize(
    "settings",
    [{"budget": 200, "num_seqs": 40, "kv_tokens": 8192}, {"budget": 17, "num_seqs": 7}, {"kv_tokens": 192}],
    ids=["several kinds", "chunks", "preemption"],
)
def test_tokens_and_logprobs_are_the_plain_runners(tiny: Tiny, no_cuda: None, settings: dict[str, Any]) -> None:
    specs = requests(40 if settings.get("num_seqs") == 40 else 10, max_tokens=6)
    specs += [
        GenerateSpec(
            f"p{i}", [3 + (5 * i + j) % (VOCAB - 3) for j in range(9 * i + 2)], Sampling(temperature=0.0), Stop(3),
            DIGESTS[i % len(DIGESTS)], prompt_logprobs=2, arrival=50.0 + i,
        )
        for i in range(3)
    ]  # fmt: skip
    engine = padding(tiny, **settings)
    got, expected = run(engine, specs), run(build_engine(tiny, **settings), specs)
    same(got[0], expected[0])
    for name, entries in expected[1].items():
        assert [e.logprob for e in got[1][name]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    replayed = engine.runner.graphs.replayed
    assert {kind.is_decode for kind in replayed} == {True, False}
    assert {bool(kind.max_rank) for kind in replayed} >= {True}


def test_requests_without_an_adapter_replay_what_a_server_without_lora_does(
    tiny: Tiny, no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, specs = padding(tiny), requests(12)
    run(engine, specs)  # adapters are in their slots
    engine.runner.graphs.replayed.clear()
    base = [spec for spec in specs if spec.adapter_digest is None]
    expected = run(build_engine(tiny), base)[0]
    monkeypatch.setattr("inference_service.lora.linear.product_and_delta", None)
    same(run(engine, base)[0], expected)
    assert {kind.max_rank for kind in engine.runner.graphs.replayed} == {0}


@pytest.mark.parametrize("family", ["qwen2", "llama-tied"])
def test_gains_and_offsets_take_the_kernels_way(
    tmp_path: Path, no_cuda: None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DoRA and biases, with plain adapters and the base model in one batch, as PEFT computes them."""
    monkeypatch.setattr(CudaRunner, "_forward_plain", None)
    names = ["plain", "lora-bias", "bias-all", "bias-lora-only", "dora"]
    world = build(tmp_path, family, [name for name in names if CASES[name].fits(family)])
    specs = kinds_requests(world, 3)
    engine = padding(world, budget=160, num_seqs=32, slots=16, adapter_bytes=4 << 20, kv_tokens=4096)
    answers, _ = run(engine, specs)
    for spec in specs:
        check(world, spec, *answers[spec.request_id, 0])
    assert any(kind.has_affine for kind in engine.runner.graphs.replayed)


def test_a_chunk_in_which_an_adapter_starts_has_two_runs(tiny: Tiny, no_cuda: None) -> None:
    """The work list has room for as many as a step can have."""
    digest = DIGESTS[1]
    specs = [
        GenerateSpec(
            f"a{i}", [3 + (i + j) % (VOCAB - 3) for j in range(18)], Sampling(temperature=0.0), Stop(2), digest,
            adapter_start=1,
        )
        for i in range(12)
    ]  # fmt: skip
    settings = {"budget": 256, "num_seqs": 12}
    engine = padding(tiny, **settings)
    same(run(engine, specs)[0], run(build_engine(tiny, **settings), specs)[0])
    kind = engine.runner.kinds.mixed(12 * 18, 0, 12, 8)
    assert kind in engine.runner.graphs.replayed
    assert num_chunks(kind) >= 12 * 3


def wants_everything(chunks: Sequence[Chunk]) -> bool:
    """An adapter, penalties, biases, and logprobs of every row with the most alternatives."""
    specs = [chunk.sequence.request.spec for chunk in chunks]
    rows = sum(len(chunk.scored_positions) + chunk.samples for chunk in chunks)
    return (
        rows == sum(chunk.length for chunk in chunks)
        and all(chunk.sequence.handle is not None for chunk in chunks)
        and all(spec.logprobs == spec.prompt_logprobs == MAX_LOGPROBS for spec in specs)
        and all(spec.sampling.logit_bias and spec.sampling.repetition_penalty != 1.0 for spec in specs)
    )


def test_the_warm_up_runs_the_heaviest_steps_and_leaves_nothing_behind(
    tiny: Tiny, no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, seqs = 96, 7
    engine, launched = padding(tiny, budget=budget, num_seqs=seqs), []
    launch = engine.runner.launch

    def note(schedule: Schedule) -> Any:
        launched.append(schedule)
        return launch(schedule)

    engine.runner.arena.ranks[0] = MAX_RANK
    with torch.inference_mode(), monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", note)
        _run_heaviest(engine.runner)
    engine.runner.arena.ranks[0] = 0
    heaviest = [step.chunks for step in launched if wants_everything(step.chunks)]
    tokens = {(len(chunks), sum(chunk.length for chunk in chunks)) for chunks in heaviest}
    assert {(1, budget), (seqs, budget // seqs * seqs)} <= tokens
    full = [step.chunks for step in launched if len(step.chunks) == step.num_decodes == seqs]
    asked = {(str(chunks[0].sequence.request.spec.sampling), chunks[0].sequence.handle) for chunks in full}
    assert len(asked) == 2 * 5  # kinds of sampling, with an adapter and without
    same(run(engine, requests(12))[0], run(build_engine(tiny), requests(12))[0])
    engine.scheduler.check_integrity()
