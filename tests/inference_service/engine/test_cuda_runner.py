"""Fused kernels, captured graphs and steps launched ahead give what the plain runner gives, in float32 on a GPU."""

import time

import pytest
import torch

from inference_service.types import GenerateSpec, Sampling, Stop
from tests.inference_service.engine.tiny_engine import API, DIGESTS, build_engine, requests, run, same
from tests.inference_service.engine.tiny_model import VOCAB, build_tiny

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
PENALTIES = {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def fused(tiny, **settings):
    engine = build_engine(tiny, runner_class=CudaRunner, device="cuda", host=tiny.host.pin_memory(), **settings)
    engine.runner.warm_up()
    return engine


@pytest.fixture(scope="module")
def engines(tiny):
    """One for each of SETTINGS, built when it is first asked for."""
    built = {}

    def engine(setting):
        if setting not in built:
            built[setting] = fused(tiny, **SETTINGS[setting])
        return built[setting]

    return engine


@pytest.fixture(scope="module")
def plain(tiny):
    return run(build_engine(tiny), requests(12))


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_and_logprobs_are_the_plain_runners(tiny, engines, plain, setting):
    same(run(engines(setting), requests(12))[0], plain[0])
    same(run(engines(setting), requests(12))[0], plain[0])  # what is cached now is the same


@pytest.mark.parametrize("setting", ["default", "chunks", "preemption"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05},
     {"temperature": 1.0, "n": 3},
     PENALTIES,
     {**PENALTIES, "temperature": 0.0, "n": 2},
     {"temperature": 0.7, "logit_bias": {5: 4.0, 9: -100.0, 17: 2.5}},
     {**PENALTIES, "logit_bias": dict.fromkeys(range(40, 110), -3.0), "top_k": 20, "top_p": 0.9}],
    ids=str,
)  # fmt: skip
def test_sampled_tokens_are_the_plain_runners(tiny, engines, sampling, setting):
    expected = run(build_engine(tiny), requests(8, **sampling))[0]
    same(run(engines(setting), requests(8, **sampling))[0], expected)


def test_penalties_of_some_do_not_touch_others(tiny, engines):
    specs = [
        spec if i % 3 else GenerateSpec(f"p{i}", spec.prompt_ids, Sampling(**PENALTIES), Stop(24, ignore_eos=True))
        for i, spec in enumerate(requests(12, temperature=0.6))
    ]
    same(run(engines("default"), specs)[0], run(build_engine(tiny), specs)[0])


def test_steps_with_history_are_launched_ahead(engines):
    engine = engines("default")
    for spec in requests(4, **PENALTIES):
        engine.submit(API, spec)
    pending = 0
    while engine.scheduler.has_work:
        engine.answer_adapters()
        engine.scheduler.adapters.poll()
        engine.step(time.monotonic())
        pending = max(pending, sum(sequence.num_pending for sequence in engine.scheduler.running))
    assert pending == 4  # launched, and not read when step returns


@pytest.mark.parametrize("setting", ["default", "preemption"])
def test_min_tokens_and_stop_ids(tiny, engines, setting):
    specs = [
        GenerateSpec(
            f"r{i}", [5 + i], Sampling(temperature=0.8, seed=i, logit_bias={2: 6.0, 7: 6.0}),
            Stop(16, min_tokens=i, token_ids=(7, 11)), adapter_digest=DIGESTS[i % len(DIGESTS)], logprobs=0,
        )
        for i in range(12)
    ]  # fmt: skip
    expected = run(build_engine(tiny), specs)[0]
    assert any(len(tokens) < 16 for tokens, _ in expected.values())
    same(run(engines(setting), specs)[0], expected)


@pytest.mark.parametrize("setting", ["default", "chunks", "preemption"])
def test_prompt_logprobs_are_the_plain_runners(tiny, engines, setting, monkeypatch):
    monkeypatch.setattr("inference_service.engine.cuda_runner.SCORED_LOGIT_BYTES", 4 * VOCAB * 5)  # five rows a piece
    specs = [
        GenerateSpec(
            f"r{i}", [(7 * i + 3 * j) % (VOCAB - 3) + 3 for j in range(5 * i + 2)], Sampling(temperature=0),
            Stop(i % 3), DIGESTS[i % len(DIGESTS)],
            prompt_logprobs=(0, 3, None, 20)[i % 4], logprobs=(None, 0, 5)[i % 3],
        )
        for i in range(10)
    ]  # fmt: skip
    expected, actual = run(build_engine(tiny), specs), run(engines(setting), specs)
    same(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for request, entries in expected[1].items():
        for wanted, got in zip(entries, actual[1][request], strict=True):
            assert got.token_id == wanted.token_id
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)


def test_logprobs_of_some_rows_with_alternatives(tiny, engines):
    specs = [
        GenerateSpec(f"r{i}", [3 + i], Sampling(temperature=1.0, seed=i), Stop(6, ignore_eos=True), logprobs=wanted)
        for i, wanted in enumerate([None, 4, 0, None, 20, 1])
    ]
    answers = {
        name: entries_of(engine, specs)
        for name, engine in (("fused", engines("default")), ("plain", build_engine(tiny)))
    }
    assert answers["fused"].keys() == answers["plain"].keys() == {"r1", "r2", "r4", "r5"}
    for request, entries in answers["plain"].items():
        for wanted, got in zip(entries, answers["fused"][request], strict=True):
            assert got.token_id == wanted.token_id
            assert [t for t, _ in got.top] == [t for t, _ in wanted.top]
            assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)


def entries_of(engine, specs):
    found = {}
    for spec in specs:
        engine.submit(API, spec)
    while engine.scheduler.has_work:
        for output in engine.step(time.monotonic()).values():
            for delta in output.deltas:
                if delta.logprobs is not None:
                    found.setdefault(delta.request_id, []).extend(delta.logprobs)
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}, PENALTIES], ids=str)
def test_a_broken_adapter_fails_its_own_requests_only(tiny, sampling):
    """Steps that were launched after its rows had no token run on, and nobody notices."""
    broken, host = "sha256:all", tiny.host.clone()
    acquired = tiny.acquired[broken]
    host[acquired.host_offset : acquired.host_offset + acquired.layout.nbytes].view(torch.float32).fill_(float("nan"))
    specs = requests(12, **sampling)
    expected = run(build_engine(tiny), specs)[0]
    engine = fused(tiny._replace(host=host))
    for _ in range(2):
        for spec in specs:
            engine.submit(API, spec)
        answers, failed = {}, {}
        while engine.scheduler.has_work:
            engine.answer_adapters()
            engine.scheduler.adapters.poll()
            for output in engine.step(time.monotonic()).values():
                failed.update({failure.request_id: failure.error.reason for failure in output.failed})
                for delta in output.deltas:
                    answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        bad = {spec.request_id for spec in specs if spec.adapter_digest == broken}
        assert failed == dict.fromkeys(bad, "ADAPTER_INVALID")
        assert answers == {name: tokens for (name, _), (tokens, _) in expected.items() if name not in bad}
        engine.scheduler.check_integrity()
