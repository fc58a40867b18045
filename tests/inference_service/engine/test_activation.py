"""Adapters that act from a position on (aLoRA): what they share of the KV cache, and what PEFT makes of them."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from inference_service.engine.blocks import chain_seed, extend_chain
from inference_service.engine.device_batch import segments_of
from inference_service.engine.sequence import Request
from inference_service.engine.step import Chunk, Schedule, adapter_runs
from inference_service.lora.batch import LoraBatch
from inference_service.lora.residents import Handle
from inference_service.requests import activation_start
from inference_service.types import GenerateSpec, Sampling, Stop
from tests.inference_service.engine import engine_fakes, tiny_engine
from tests.inference_service.engine.tiny_model import VOCAB, Tiny, pack

BLOCK_SIZE = 4
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INVOCATIONS = {"sha256:one": [7, 8, 9], "sha256:other": [11], "sha256:plain": None}


def chain(digest: str | None, start: int, num_blocks: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    seed = chain_seed("t", "w", digest, "", start)
    extend_chain(hashes, seed, list(range(num_blocks * BLOCK_SIZE)), BLOCK_SIZE, num_blocks)
    return hashes


def test_blocks_before_the_activation_are_the_base_models() -> None:
    base = chain(None, 0)
    for start in range(1, 17):
        named, whole = chain("d", start), start // BLOCK_SIZE
        assert named[:whole] == base[:whole]
        assert not set(named[whole:]) & set(base)
        assert chain("e", start)[:whole] == base[:whole]
        assert not set(chain("e", start)[whole:]) & set(named)
    assert not set(chain("d", 0)) & set(base)
    # The same tokens in one block, but another number of them without the adapter.
    assert chain("d", 9)[2] != chain("d", 10)[2]


def test_a_chain_may_be_extended_piece_by_piece() -> None:
    seed, tokens, hashes = chain_seed("t", "w", "d", "", 6), list(range(16)), []
    for count in range(1, 5):
        extend_chain(hashes, seed, tokens[: count * BLOCK_SIZE], BLOCK_SIZE, count)
    assert hashes == chain("d", 6)


def cached_tokens(engine, spec) -> int:  # type: ignore[no-untyped-def]
    """Of a request that runs to its end."""
    engine.submit(b"api", spec)
    found = []
    for step in range(50):
        engine.scheduler.adapters.arrive()
        for output in engine.step(float(step)).values():
            found += [started.cached_tokens for started in output.started]
        engine.scheduler.check_integrity()
        if not engine.scheduler.has_work:
            return found[0]
    raise AssertionError("still busy")


def test_an_activated_adapter_finds_what_the_base_model_and_others_computed() -> None:
    engine = engine_fakes.build_engine(num_blocks=64)
    prompt = list(range(20, 38))  # 4 full blocks and 2 tokens

    def cached(name: str, adapter: str | None, start: int) -> int:
        spec = engine_fakes.spec(name, prompt, 2, adapter=adapter, adapter_start=start)
        return cached_tokens(engine, spec)

    assert cached("base", None, 0) == 0
    assert cached("first", "d", 9) == 8  # blocks 0 and 1 are wholly before the activation
    assert cached("again", "d", 9) == 16
    assert cached("other", "e", 13) == 12
    assert cached("plain", "d", 0) == 0
    assert cached("base again", None, 0) == 16


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_request_reads_what_an_adapter_it_has_not_computed(data: st.DataObject) -> None:
    """The fake runner checks every position that a step reads: its tokens, and which adapter acted on it."""
    engine = engine_fakes.build_engine(num_blocks=data.draw(st.integers(10, 24)), looks_ahead=data.draw(st.booleans()))
    prefix = [5] * 30
    for number in range(data.draw(st.integers(2, 10))):
        prompt = prefix[: data.draw(st.integers(1, 24))] + [number] * data.draw(st.integers(0, 2))
        adapter = data.draw(st.sampled_from([None, "d", "e"]))
        start = data.draw(st.integers(0, len(prompt) - 1)) if adapter else 0
        scored = data.draw(st.sampled_from([None, None, 0]))
        options = {"adapter_start": start, "prompt_logprobs": scored}
        engine.submit(b"api", engine_fakes.spec(f"{number}", prompt, 6, adapter=adapter, **options))
        for step in range(data.draw(st.integers(0, 6))):
            engine.scheduler.adapters.arrive()
            assert not any(output.failed for output in engine.step(float(step)).values())
    for step in range(400):
        engine.scheduler.adapters.arrive()
        assert not any(output.failed for output in engine.step(float(step)).values())
        engine.scheduler.check_integrity()
        if not engine.scheduler.has_work:
            return
    raise AssertionError("still busy")


@pytest.mark.parametrize(
    ("prompt", "activation", "start"),
    [
        ([1, 2, 3], (), 0),
        ([7, 8, 9], (7, 8, 9), 0),
        ([7, 8, 9, 1, 7, 8, 9, 7, 8], (7, 8, 9), 4),
        ([7, 7, 7], (7, 7), 1),
        ([7, 8], (7, 8, 9), None),
        ([1, 2, 3], (7,), None),
    ],
)
def test_the_last_occurrence_activates(prompt: list[int], activation: tuple[int, ...], start: int | None) -> None:
    assert activation_start(prompt, activation) == start


def chunk(slot: int, activation: int, start: int, length: int) -> Chunk:
    spec = engine_fakes.spec(f"{slot} {start}", range(40), adapter="d", adapter_start=activation)
    sequence = Request(spec, b"", chain_seed("t", "w", None, ""), 0).sequences[0]
    sequence.handle = Handle(slot, 1) if slot >= 0 else None
    return Chunk(sequence, start, length, samples=False)


def test_rows_before_the_activation_are_in_no_segment() -> None:
    """Of chunks before, across and behind it, as both runners see them."""
    chunks = (
        chunk(2, 10, 30, 1),  # decodes
        chunk(2, 10, 2, 8),
        chunk(2, 10, 8, 5),
        chunk(2, 0, 0, 4),
        chunk(3, 7, 7, 2),
        chunk(-1, 0, 0, 3),
    )
    found = segments_of(Schedule(chunks, num_decodes=1))
    assert [tuple(segment) for segment in found] == [(2, 0, 1), (2, 11, 18), (3, 18, 20)]
    assert LoraBatch.build(*adapter_runs(chunks), torch.device("cpu")).segments == found  # type: ignore[union-attr]


# ---- against PEFT


class Activated(NamedTuple):
    tiny: Tiny
    oracle: PeftModel


@pytest.fixture(scope="module")
def activated(tmp_path_factory: pytest.TempPathFactory) -> Activated:
    folder = tmp_path_factory.mktemp("activated")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / "base")
    model: PeftModel | None = None
    for digest, invocation in INVOCATIONS.items():
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=LINEARS, init_lora_weights=False,
            alora_invocation_tokens=invocation,
        )  # fmt: skip
        name = digest.removeprefix("sha256:")
        if model is None:
            model = get_peft_model(base, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    assert model is not None
    model.save_pretrained(folder / "adapters")
    return Activated(Tiny(folder / "base", *pack(folder, INVOCATIONS), model.eval()), model.eval())


@torch.inference_mode()
def expected_logprobs(oracle: PeftModel, ids: list[int], num_prompt: int, digest: str | None) -> torch.Tensor:
    """Log-softmax `[len(ids), vocab]` with the adapter acting from where the prompt, not the output, activates it."""
    inputs = torch.tensor([ids])
    if digest is None:
        with oracle.disable_adapter():
            return torch.log_softmax(oracle(inputs).logits[0], -1)
    oracle.set_adapter(digest.removeprefix("sha256:"))
    start = activation_start(ids[:num_prompt], tuple(INVOCATIONS[digest] or ()))
    offsets = None if INVOCATIONS[digest] is None else [None if start is None else len(ids) - start]
    return torch.log_softmax(oracle(inputs, alora_offsets=offsets).logits[0], -1)


def specs(count: int, *, prompt_logprobs: bool) -> list[GenerateSpec]:
    chosen, made = random.Random(11), []
    shared = [chosen.randrange(20, VOCAB) for _ in range(48)]
    for number in range(count):
        digest = [None, *INVOCATIONS][number % 4]
        invocation = list(INVOCATIONS.get(digest or "") or ())
        prompt = shared[: chosen.choice([3, 16, 33, 48])]
        if number % 5:  # else it is not activated, and is the base model's
            prompt = prompt + invocation + [chosen.randrange(20, VOCAB) for _ in range(chosen.choice([0, 1, 9, 21]))]
        start = activation_start(prompt, tuple(invocation))
        made.append(
            GenerateSpec(
                f"r{number}", prompt, Sampling(temperature=0.0), Stop(12, ignore_eos=True),
                adapter_digest=None if start is None else digest, adapter_start=start or 0, logprobs=0,
                prompt_logprobs=0 if prompt_logprobs and number % 2 else None,
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize(
    "options",
    [{}, {"budget": 9, "num_seqs": 8}, {"prefix_caching": False}, {"kv_tokens": 160, "budget": 24, "block_size": 8}],
    ids=["at once", "chunked", "without prefix cache", "preempted"],
)
def test_logprobs_and_tokens_are_those_of_peft_in_mixed_batches(
    activated: Activated, options: dict[str, object]
) -> None:
    engine = tiny_engine.build_engine(activated.tiny, **options)
    for _ in range(2):  # the second time out of the prefix cache
        asked = specs(16, prompt_logprobs=True)
        answers, scores = tiny_engine.run(engine, asked)
        for number, spec in enumerate(asked):
            digest = [None, *INVOCATIONS][number % 4]
            tokens, logprobs = answers[spec.request_id, 0]
            prompt = spec.prompt_ids
            logits = expected_logprobs(activated.oracle, [*prompt, *tokens], len(prompt), digest)
            assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            wanted = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            assert logprobs == pytest.approx(wanted, abs=1e-4)
            if spec.prompt_logprobs is not None:
                told = [entry.logprob for entry in scores[spec.request_id]]
                rest = logits[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
                assert told == pytest.approx(rest, abs=1e-4)
    if "kv_tokens" in options:
        assert engine.scheduler.num_preemptions > 0


def test_the_oracle_tells_activated_from_plain(activated: Activated) -> None:
    ids = [30, 31, 7, 8, 9, 33]
    texts = [expected_logprobs(activated.oracle, ids, 6, digest) for digest in (None, "sha256:one", "sha256:plain")]
    assert torch.equal(texts[0][:2], texts[1][:2])
    assert (texts[0][2:] - texts[1][2:]).abs().max() > 0.1
    assert (texts[1][:2] - texts[2][:2]).abs().max() > 0.1
