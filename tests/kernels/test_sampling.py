"""Sampling's kernels against the reference: filters, noise, penalties, and what must not influence a row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import sampling, sampling_reference
from kernels.philox import gumbel, philox, token_bits
from kernels.sampling import NOT_FINITE, PROMPT_BIT, Adjustments, SamplingRows, TopLogprobs
from tests.kernels.poisoning import DEVICE, DTYPES, poison_empty, poisoned, random

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernels import sampling_triton  # noqa: E402  the interpreter is chosen by conftest

VOCABS = (5, 33, 1024, 1025, 3000)
FILTERS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.3, 40, 0.8, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.3, 0.05),
    (1.0, 0, 1.0, 0.2),
    (0.0, 3, 0.5, 0.1),
    (1.0, 1 << 30, 0.0, 0.0),
    (1.0, 700, 0.99, 0.01),
]


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, [sampling_triton])


def sampling_rows(filters: list[tuple[float, int, float, float]], seed: int = 7) -> SamplingRows:
    columns = list(zip(*filters, strict=True))
    count = len(filters)
    floats = (torch.tensor(columns[i], dtype=torch.float32, device=DEVICE) for i in (0, 2, 3))
    temperature, top_p, min_p = floats
    top_k = torch.tensor(columns[1], dtype=torch.int32, device=DEVICE)
    seeds = (torch.arange(count, device=DEVICE) - 1) * 0x7654_3210_1234_5678 + seed
    index, position = torch.arange(count, device=DEVICE) % 2, torch.arange(count, device=DEVICE) * 3
    return SamplingRows(temperature, top_k, top_p, min_p, seeds, index, position)


def row(rows: SamplingRows, i: int) -> SamplingRows:
    return SamplingRows(*(column[i : i + 1] for column in rows))


def find_cutoffs(logits: Tensor, rows: SamplingRows) -> Tensor:
    return sampling_triton._cutoffs(logits, rows, -(-logits.shape[1] // sampling_triton.SEGMENT))


def reference_cutoffs(logits: Tensor, rows: SamplingRows) -> Tensor:
    return sampling_reference.cutoffs(logits.float() / rows.temperature[:, None], rows)


# ---- the token


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_sample(vocab: int, dtype: torch.dtype) -> None:
    rows = sampling_rows(FILTERS)
    logits = (3 * random(len(FILTERS), vocab + 3, dtype=torch.float32, seed=vocab)).to(dtype)[:, :vocab]
    out = poisoned(len(FILTERS), dtype=torch.int64)
    assert sampling_triton.sample(logits, rows, filtered=True, out=out) is out
    assert out.tolist() == sampling_reference.sample(logits, rows, filtered=True).tolist()


def test_unfiltered() -> None:
    rows = sampling_rows([(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)])
    logits = random(3, 2500, dtype=torch.float32)
    tokens = sampling_triton.sample(logits, rows, filtered=False)
    assert torch.equal(tokens, sampling_reference.sample(logits, rows, filtered=False))
    assert torch.equal(tokens, sampling_triton.sample(logits, rows, filtered=True))


def test_equals_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(2, 2100, device=DEVICE)
    logits[0, [1030, 2090]] = 1.0
    logits[1, [3, 1023, 1024]] = 2.0
    rows = sampling_rows([(0.0, 0, 1.0, 0.0)] * 2)
    for filtered in (False, True):
        assert sampling_triton.sample(logits, rows, filtered=filtered).tolist() == [1030, 3]


def test_a_row_depends_on_no_other_row() -> None:
    rows, logits = sampling_rows(FILTERS), random(len(FILTERS), 1100, dtype=torch.float32)
    together = sampling_triton.sample(logits, rows, filtered=True)
    for i in range(0, len(FILTERS), 3):
        assert sampling_triton.sample(logits[i : i + 1], row(rows, i), filtered=True)[0] == together[i]


def test_forbidden_tokens_are_never_chosen() -> None:
    logits = random(4, 300, dtype=torch.float32)
    logits[:, 5:] = float("-inf")
    rows = sampling_rows([(1.0, 0, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (1.0, 0, 0.99, 0.0), (0.0, 0, 1.0, 0.0)])
    assert (sampling_triton.sample(logits, rows, filtered=True) < 5).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("where", [slice(7, 8), slice(1070, 1071), slice(None)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token_and_spoils_no_other(value: float, where: slice, filtered: bool) -> None:
    filters = FILTERS[::2]
    rows, logits = sampling_rows(filters), random(len(filters), 1100, dtype=torch.float32)
    before = sampling_triton.sample(logits, rows, filtered=filtered)
    logits[::2, where] = value
    expected = before.clone()
    expected[::2] = NOT_FINITE
    for op in (sampling_triton, sampling_reference):
        assert torch.equal(op.sample(logits, rows, filtered=filtered), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("filtered", [False, True])
def test_nothing_but_impossible_tokens_is_not_finite(filtered: bool) -> None:
    rows, logits = sampling_rows(FILTERS), torch.full((len(FILTERS), 40), float("-inf"), device=DEVICE)
    logits[1:, 11] = -3.0
    for op in (sampling_triton, sampling_reference):
        assert op.sample(logits, rows, filtered=filtered).tolist() == [NOT_FINITE] + [11] * (len(FILTERS) - 1)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_captured_graph_follows_the_device_data() -> None:
    rows, logits = sampling_rows(FILTERS), random(len(FILTERS), 128256, dtype=torch.bfloat16)
    sampling_triton.sample(logits, rows, filtered=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampling_triton.sample(logits, rows, filtered=True)
    for seed in range(3):
        logits.copy_(3 * random(*logits.shape, dtype=torch.bfloat16, seed=seed))
        rows.position.add_(1)
        graph.replay()
        assert torch.equal(captured, sampling_triton.sample(logits, rows, filtered=True))
        assert (captured == sampling_reference.sample(logits, rows, filtered=True)).sum() >= len(FILTERS) - 1


# ---- the cutoff


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_cutoff(step: float, vocab: int) -> None:
    rows = sampling_rows([each for each in FILTERS if each[0] > 0])
    logits = 2 * random(len(rows.top_k), vocab, dtype=torch.float32, seed=vocab)
    if step:  # many equals
        logits = (logits / step).round() * step
    scores = logits / rows.temperature[:, None]
    kept, expected = (
        scores >= cutoffs[:, None] for cutoffs in (find_cutoffs(logits, rows), reference_cutoffs(logits, rows))
    )
    assert torch.equal(kept, expected)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(-40, 40), min_size=1, max_size=60),
    unit=st.sampled_from([0.01, 0.3, 5.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
)
def test_any_cutoff(values: list[int], unit: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([values], device=DEVICE) * unit
    rows = sampling_rows([(1.0, top_k, top_p, min_p)])
    probabilities = np.sort(torch.softmax(logits.double()[0], 0).cpu().numpy())[::-1]
    if 0 < top_k < len(values):
        probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
    if top_p < 1 and np.abs(probabilities.cumsum() - top_p).min() < 1e-5:
        return  # a coin toss in float32
    cutoff = find_cutoffs(logits, rows)[:, None]
    assert torch.equal(logits >= cutoff, logits >= reference_cutoffs(logits, rows)[:, None])


# ---- noise


def test_philox_known_answers() -> None:
    """Of Random123's test vectors for philox4x32-10."""
    known = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in known:
        actual = philox(tuple(torch.tensor([c]) for c in counter), *(torch.tensor([k]) for k in key))
        assert " ".join(f"{int(word):08x}" for word in actual) == words


@triton.jit
def _store_noise(out, seed, index, position, GROUPS: tl.constexpr):
    noise = sampling_triton._gumbel(tl.arange(0, GROUPS), tl.load(seed), tl.load(index), tl.load(position))
    tl.store(out + tl.arange(0, 4 * GROUPS), noise)


@pytest.mark.parametrize(
    ("seed", "index", "position"), [(0, 0, 0), (1, 2, 3), (-1, 127, 1 << 20), (0x1234_5678_9ABC_DEF0, 1, 131071)]
)
def test_noise_is_that_of_the_reference(seed: int, index: int, position: int) -> None:
    columns = [torch.tensor([value], dtype=torch.int64, device=DEVICE) for value in (seed, index, position)]
    out = poisoned(4096, dtype=torch.float32)
    _store_noise[(1,)](out, *columns, GROUPS=1024)
    bits = token_bits(4096, *columns)[0]
    uniform = ((bits >> 9).double() + 0.5) / 2**23
    torch.testing.assert_close(out.double(), -torch.log(-torch.log(uniform)), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(out, gumbel(bits), rtol=2e-6, atol=2e-6)


def test_the_greatest_noise_is_finite_and_exact() -> None:
    bits = torch.tensor([0, 0xFFFFFFFF])
    assert gumbel(bits).tolist() == pytest.approx([-2.81154, 16.63553], abs=1e-4)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 20_000
    rows = sampling_rows([(1.0, 0, 1.0, 0.0)] * count)._replace(position=torch.arange(count, device=DEVICE))
    tokens = sampling_reference.sample(logits.to(DEVICE).expand(count, -1), rows, filtered=False)
    shares = torch.bincount(tokens, minlength=4).cpu() / count
    assert shares.tolist() == pytest.approx(logits.softmax(0).tolist(), abs=0.012)


# ---- penalties and bias


def adjustments(rows: int, vocab: int) -> Adjustments:
    """The first row has no penalties, the last one no biases; the others' rows of counts and biases are shuffled."""
    counts = poisoned(rows + 2, vocab, dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    count_rows = torch.arange(rows, dtype=torch.int32, device=DEVICE) + 1
    for i in range(rows):
        prompt, output = (torch.randint(0, vocab, (n,), generator=generator).to(DEVICE) for n in (9, 12))
        counts[i + 1] = 0
        sampling.set_counts(counts, (i + 1) * vocab + prompt, (i + 1) * vocab + output)
    count_rows[0] = -1
    ids = torch.stack([torch.randperm(max(vocab, 200), generator=generator)[:200] for _ in range(rows)])
    entries = torch.empty((rows, 2, 200), dtype=torch.int32, device=DEVICE)  # ids beside values
    entries[:, 0] = ids.to(DEVICE, torch.int32)
    entries[:, 0].masked_fill_(entries[:, 0] >= vocab, -1)
    entries[:, 0, 166:] = -1
    values = entries[:, 1].view(torch.float32)
    values[:] = random(rows, 200, dtype=torch.float32, seed=4)
    values[:, :2] = float("-inf")
    bias_rows = torch.arange(rows, dtype=torch.int32, device=DEVICE).flip(0)
    bias_rows[-1] = -1
    ones = torch.ones(rows, device=DEVICE)
    return Adjustments(1.3 * ones, 0.4 * ones, -0.2 * ones, count_rows, counts, bias_rows, entries[:, 0], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adjust(dtype: torch.dtype) -> None:
    logits, wanted = random(4, 1100, dtype=dtype), adjustments(4, 1100)
    before = logits.clone()
    actual, expected = sampling_triton.adjust(logits, wanted), sampling_reference.adjust(logits, wanted)
    assert torch.equal(actual, expected)
    assert torch.equal(logits, before)
    assert (actual == float("-inf")).sum() == 6


def test_adjust_without_biases() -> None:
    logits, wanted = random(2, 100, dtype=torch.float32), adjustments(2, 100)
    wanted = wanted._replace(bias_ids=wanted.bias_ids[:, :0], bias_values=wanted.bias_values[:, :0])
    actual = sampling_triton.adjust(logits, wanted)
    assert torch.equal(actual, sampling_reference.adjust(logits, wanted))
    assert torch.equal(actual[0], logits[0])


def test_penalties_by_hand() -> None:
    counts = torch.zeros(1, 6, dtype=torch.int32, device=DEVICE)
    sampling.set_counts(counts, *(torch.tensor(ids, device=DEVICE) for ids in ([0, 1, 1], [1, 2, 2])))
    assert counts[0].tolist() == [PROMPT_BIT, PROMPT_BIT + 1, 2, 0, 0, 0]
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for op in (sampling_triton, sampling_reference):
        counts[0, 3] = 0
        for count_rows, token in ((rows, 3), (rows - 1, 3), (rows, NOT_FINITE)):
            op.count_tokens(counts, count_rows, torch.tensor([token], device=DEVICE))
        assert counts[0].tolist() == [PROMPT_BIT, PROMPT_BIT + 1, 2, 1, 0, 0]
    ones = torch.ones(1, device=DEVICE)
    no_bias = torch.zeros(1, 0, dtype=torch.int32, device=DEVICE)
    wanted = Adjustments(2 * ones, 0.5 * ones, ones, rows, counts, rows - 1, no_bias, no_bias.float())
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0, 4.0, -4.0]], device=DEVICE)
    expected = [2.0, -8.0 - 1.5, 2.0 - 2.5, 2.0 - 1.5, 4.0, -4.0]
    assert sampling_triton.adjust(logits, wanted)[0].tolist() == expected
    assert sampling_reference.adjust(logits, wanted)[0].tolist() == expected


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 9)), max_size=5, unique_by=lambda pair: pair[0]),
)
def test_counts_follow_the_tokens(tokens: list[tuple[int, int]]) -> None:
    expected = torch.zeros(5, 10, dtype=torch.int32)
    for count_row, token in tokens:
        if count_row >= 0 and token >= 0:
            expected[count_row, token] += 1
    rows = torch.tensor([count_row for count_row, _ in tokens], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([token for _, token in tokens], dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(5, 10, dtype=torch.int32, device=DEVICE)
    if tokens:
        sampling_triton.count_tokens(counts, rows, ids)
    assert torch.equal(counts.cpu(), expected)


# ---- logprobs and tokens on the device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_token_logprobs(vocab: int, dtype: torch.dtype) -> None:
    logits = (4 * random(4, vocab + 2, dtype=torch.float32, seed=vocab)).to(dtype)[:, :vocab]
    ids = torch.tensor([4, 0, vocab - 1, NOT_FINITE], device=DEVICE)
    expected = logits.double().log_softmax(-1)
    count = min(7, vocab)
    for op in (sampling_triton, sampling_reference):
        chosen = poisoned(6, dtype=torch.float32)
        out = TopLogprobs(chosen[1:5], poisoned(4, 9, dtype=torch.int32), poisoned(4, 9, dtype=torch.float32))
        op.token_logprobs(logits, ids, count, out)
        wanted = expected.gather(1, ids.clamp(min=0)[:, None])[:, 0]
        torch.testing.assert_close(out.chosen[:3].double(), wanted[:3], rtol=1e-6, atol=2e-6)
        top = out.top[:, :count]
        torch.testing.assert_close(top.double(), expected.topk(count).values, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(
            top.double(), expected.gather(1, out.top_ids[:, :count].long()), rtol=1e-6, atol=2e-6
        )
        assert chosen[[0, 5]].isnan().all()
        assert out.top[:, count:].isnan().all()


def test_token_logprobs_without_alternatives_and_with_all() -> None:
    logits = random(3, 5, dtype=torch.float32)
    ids = torch.tensor([4, 0, 2], device=DEVICE)
    assert sampling.token_logprobs(logits, ids, 0).top.shape == (3, 0)
    assert sampling.token_logprobs(logits, ids, 20).top.exp().sum(-1).tolist() == pytest.approx([1.0] * 3)


def test_take_sampled() -> None:
    token_ids, sampled = torch.arange(300, device=DEVICE), torch.tensor([70, NOT_FINITE, 72], device=DEVICE)
    sources = torch.full((300,), -1, device=DEVICE)
    sources[[0, 5, 299]] = torch.tensor([2, 1, 0], device=DEVICE)
    expected = token_ids.clone()
    expected[[0, 5, 299]] = torch.tensor([72, 0, 70], device=DEVICE)
    for op in (sampling_triton, sampling_reference):
        assert torch.equal(op.take_sampled(token_ids, sources, sampled), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the doors on a CPU")
def test_the_doors_on_a_cpu() -> None:
    logits, rows, out = (
        random(4, 100, dtype=torch.float32),
        sampling_rows(FILTERS[3:7]),
        torch.zeros(4, dtype=torch.long),
    )
    assert sampling.sample(logits, rows, filtered=True, out=out) is out
    assert torch.equal(out, sampling_reference.sample(logits, rows, filtered=True))
    wanted, adjusted = adjustments(4, 100), torch.empty_like(logits)
    assert sampling.adjust(logits, wanted, adjusted) is adjusted
    assert torch.equal(adjusted, sampling_reference.adjust(logits, wanted))
