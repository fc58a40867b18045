"""The real model and adapters through the engine: against transformers + PEFT, and against itself in every setting."""

import pytest

from inference_service.types import GenerateSpec, Sampling, Stop
from tests.inference_service.engine.tiny_engine import DIGESTS, build_engine, requests, run, same
from tests.inference_service.engine.tiny_model import VOCAB, build_tiny, oracle_logits

# PEFT asks transformers for an attribute that it is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TIE_GAP = 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(tiny):
    """Each request by itself, whole prompts, nothing cached."""
    engine = build_engine(tiny, budget=512, prefix_caching=False)
    answers = {}
    for spec in requests():
        answers.update(run(engine, [spec])[0])
    return answers


def test_greedy_tokens_and_logprobs_are_those_of_transformers_and_peft(tiny, alone):
    for spec in requests():
        tokens, logprobs = alone[spec.request_id, 0]
        logits = oracle_logits(tiny, spec.prompt_ids + tokens, spec.adapter_digest)[len(spec.prompt_ids) - 1 : -1]
        top = logits.topk(2).values
        for position, token in enumerate(tokens):
            if token != int(logits[position].argmax()):
                assert float(top[position, 0] - top[position, 1]) < TIE_GAP
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
        assert logprobs == pytest.approx(expected, abs=1e-3)


def test_adapters_change_the_answer(alone):
    prompts = {tuple(tokens) for tokens, _ in alone.values()}
    assert len(prompts) == len(alone)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [16, 17, 64, 512])
def test_mixed_batch_in_any_chunks(tiny, alone, budget, prefix_caching):
    same(run(build_engine(tiny, budget=budget, prefix_caching=prefix_caching), requests())[0], alone)


def test_again_from_the_prefix_cache(tiny, alone):
    engine = build_engine(tiny)
    same(run(engine, requests())[0], alone)
    same(run(engine, requests())[0], alone)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_forced_preemption(tiny, alone, prefix_caching):
    engine = build_engine(tiny, kv_tokens=112, prefix_caching=prefix_caching, block_size=8)
    preempted = []
    preempt = engine.scheduler._preempt
    engine.scheduler._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))
    same(run(engine, requests())[0], alone)
    assert preempted


def test_fewer_slots_than_adapters(tiny, alone):
    same(run(build_engine(tiny, slots=1), requests())[0], alone)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}, {"top_k": 9, "min_p": 0.02}, {"repetition_penalty": 1.3}])
def test_sampled_tokens_do_not_depend_on_batch_chunks_or_preemption(tiny, sampling):
    specs = requests(6, temperature=0.9, n=2, **sampling)
    expected = run(build_engine(tiny, num_seqs=1, budget=512, prefix_caching=False), specs)[0]
    same(run(build_engine(tiny, budget=16), specs)[0], expected)
    same(run(build_engine(tiny, kv_tokens=112, block_size=8), specs)[0], expected)
    assert expected["r0", 0] != expected["r0", 1]


@pytest.mark.parametrize("budget", [16, 512])
def test_prompt_logprobs_in_any_chunks(tiny, budget, monkeypatch):
    monkeypatch.setattr("inference_service.engine.runner.LOGIT_BYTES", 4 * VOCAB * 5)  # five rows a piece
    engine = build_engine(tiny, budget=budget)
    prompt = [(7 * i) % (VOCAB - 3) + 3 for i in range(45)]
    specs = [
        GenerateSpec(f"r{i}", prompt, Sampling(temperature=0), Stop(i), digest, prompt_logprobs=2)
        for i, digest in enumerate(DIGESTS)
    ]
    for _ in range(2):  # the second time everything is in the prefix cache, which must not be used
        _, scores = run(engine, specs)
        for i, digest in enumerate(DIGESTS):
            expected = oracle_logits(tiny, prompt, digest).log_softmax(-1)
            assert [entry.token_id for entry in scores[f"r{i}"]] == prompt[1:]
            got = [entry.logprob for entry in scores[f"r{i}"]]
            assert got == pytest.approx([float(expected[p, t]) for p, t in enumerate(prompt[1:])], abs=1e-3)
            assert all(len(entry.top) == 2 for entry in scores[f"r{i}"])


@pytest.mark.parametrize(("eos", "own"), [(2, ()), (7, (7,))], ids=["the base model's", "the adapter's"])
def test_min_tokens_holds_the_end_back(tiny, eos, own):
    stop = Stop(9, min_tokens=4, eos_ids=own)
    spec = GenerateSpec("r", [5], Sampling(temperature=0, logit_bias={eos: 100.0}), stop)
    tokens, _ = run(build_engine(tiny), [spec])[0]["r", 0]
    assert len(tokens) == 5
    assert tokens.index(eos) == 4
