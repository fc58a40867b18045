"""Adapters of every served kind in one batch, against PEFT in float32."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference_service.types import GenerateSpec, Sampling, Stop
from shared.adapter_format.served import SERVED_KINDS
from tests.inference_service.engine.kind_models import CASES, FAMILIES, VOCAB, World, build, oracle_logits
from tests.inference_service.engine.tiny_engine import build_engine, run

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what these adapters are made of

TIE_GAP = 1e-3
TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More would only wait for each other over models as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Between them these have all that a base model may have: tied heads and others, biases, norms of q and k.
DEFAULT = ("llama-tied", "qwen3")
CHOSEN = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in FAMILIES]


@pytest.fixture(scope="module", params=CHOSEN)
def world(request, tmp_path_factory, one_thread) -> World:
    cases = [name for name, case in CASES.items() if case.kind in SERVED_KINDS]
    return build(tmp_path_factory.mktemp(request.param), request.param, cases)


def requests(world: World, seed: int) -> list[GenerateSpec]:
    """Each adapter twice, and the base model, in random order."""
    chosen = random.Random(seed)
    digests = [*world.acquired, *world.acquired, None, None]
    chosen.shuffle(digests)
    specs = []
    for number, digest in enumerate(digests):
        known = VOCAB + world.extra_vocab[digest]
        prompt = [chosen.randrange(3, known) for _ in range(chosen.choice([1, 9, 22]))]
        if known > VOCAB:
            prompt[-1] = known - 1
        specs.append(
            GenerateSpec(
                f"r{number}", prompt, Sampling(temperature=0.0), Stop(6, ignore_eos=True), digest,
                logprobs=3, prompt_logprobs=0 if number % 3 else None, extra_vocab=world.extra_vocab[digest],
            )
        )  # fmt: skip
    return specs


def check(world: World, spec: GenerateSpec, tokens: list[int], logprobs: list[float]) -> None:
    logits = oracle_logits(world, spec.prompt_ids + tokens, spec.adapter_digest)[len(spec.prompt_ids) - 1 : -1]
    top = logits.topk(2).values
    for position, token in enumerate(tokens):
        if token != int(logits[position].argmax()):
            assert float(top[position, 0] - top[position, 1]) < TIE_GAP
    expected = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(("budget", "num_seqs"), [(24, 16), (1024, 64)])
def test_all_kinds_in_one_batch(world: World, budget: int, num_seqs: int) -> None:
    engine = build_engine(world, budget=budget, num_seqs=num_seqs, slots=64, adapter_bytes=8 << 20, kv_tokens=8192)
    specs = requests(world, budget)
    answers, scores = run(engine, specs)
    for spec in specs:
        check(world, spec, *answers[spec.request_id, 0])
        if spec.prompt_logprobs is not None and len(spec.prompt_ids) > 1:
            rows = oracle_logits(world, spec.prompt_ids, spec.adapter_digest).log_softmax(-1)
            expected = rows[range(len(spec.prompt_ids) - 1), spec.prompt_ids[1:]].tolist()
            assert [e.logprob for e in scores[spec.request_id]] == pytest.approx(expected, abs=TOLERANCE)


def test_an_adapter_may_be_activated_by_a_token_that_it_adds(world: World) -> None:
    """The base model's row before it gives that token no probability, also where the step has no row of the adapter."""
    digest = next(digest for digest, added in world.extra_vocab.items() if added)
    prompt = [7, 9, 11, VOCAB, 13, 15]
    spec = GenerateSpec(
        "r", prompt, Sampling(temperature=0.0), Stop(2, ignore_eos=True), digest, prompt_logprobs=2,
        extra_vocab=world.extra_vocab[digest], adapter_start=3,
    )  # fmt: skip
    told = []
    for budget in (64, 3):
        answers, scores = run(build_engine(world, budget=budget, num_seqs=2, adapter_bytes=1 << 20), [spec])
        assert len(answers["r", 0][0]) == 2
        told.append([entry.logprob for entry in scores["r"]])
    assert told[0] == pytest.approx(told[1], abs=TOLERANCE)
    assert told[0][2] == float("-inf")


def test_every_adapter_changes_the_answer(world: World) -> None:
    base = oracle_logits(world, [5, 17, 90], None)
    for digest in world.acquired:
        changed = oracle_logits(world, [5, 17, 90], digest)[:, : base.shape[1]]
        assert float((changed - base).abs().max()) > 10 * TOLERANCE


def test_few_slots_and_little_memory(world: World) -> None:
    """Adapters come and go, and are moved: what one slot held before never shows."""
    largest = max(acquired.layout.nbytes for acquired in world.acquired.values())
    engine = build_engine(world, budget=64, num_seqs=4, slots=3, adapter_bytes=2 * largest + (64 << 10))
    specs = requests(world, 7)
    answers, _ = run(engine, specs)
    for spec in specs:
        check(world, spec, *answers[spec.request_id, 0])
    engine.scheduler.adapters.check_integrity()


class CountedOps(TorchDispatchMode):
    """Counts what PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def test_steps_without_extras_run_not_one_op_more(world: World) -> None:
    """While adapters with extras are in their slots, the base model and plain adapters cost what they cost alone."""
    plain = next(iter(world.acquired))
    specs = [
        GenerateSpec(f"{digest}", [7, 9, 11], Sampling(temperature=0.0), Stop(3, ignore_eos=True), digest)
        for digest in (None, plain)
    ]
    settings = {"budget": 64, "num_seqs": 64, "slots": 64, "adapter_bytes": 8 << 20, "prefix_caching": False}
    counts = []
    for before in ([specs[1]], requests(world, 3)):
        engine = build_engine(world, **settings)
        run(engine, before)
        with CountedOps() as ops:
            run(engine, specs)
        counts.append(ops.count)
        has_extras = any(world.acquired[spec.adapter_digest].layout.extras for spec in before if spec.adapter_digest)
        assert bool(engine.runner.arena.extras) == has_extras
    assert counts[0] == counts[1] > 0


@torch.inference_mode()
def test_base_and_plain_rows_beside_extras_keep_their_bits(world: World) -> None:
    plain = next(iter(world.acquired))
    assert not world.acquired[plain].layout.extras
    specs = [
        GenerateSpec(f"{digest}", [7, 9, 11], Sampling(temperature=0.0), Stop(1), digest, logprobs=0)
        for digest in (None, plain)
    ]
    alone, _ = run(build_engine(world, prefix_caching=False), specs)
    others = requests(world, 3)
    mixed, _ = run(
        build_engine(world, budget=512, num_seqs=64, slots=64, adapter_bytes=8 << 20, kv_tokens=8192), specs + others
    )
    for spec in specs:
        assert mixed[spec.request_id, 0][0] == alone[spec.request_id, 0][0]
        assert mixed[spec.request_id, 0][1] == pytest.approx(alone[spec.request_id, 0][1], abs=1e-5)
