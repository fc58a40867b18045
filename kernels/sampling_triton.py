# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Sampling on a GPU, without sorting the vocabulary. Semantics: `kernels.sampling`.

A row is cut into segments, one program each. Unfiltered rows take two launches: the best noisy score of every segment,
then of the row. Filtered ones take four more before: `_summarize` leaves every segment's greatest score and mass,
`_find_floor` a bound under the row's cutoff; `_collect` keeps of every segment what is not below it, in the segment's
own place, so that the order is fixed and no atomics are needed; `_find_cutoff` searches among these. Its every step
counts what lies above a value between the bounds and moves one bound to the next score there is, so it ends at a score,
after about log2(candidates) steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import MAX_TOP, Adjustments, SamplingRows, TopLogprobs
from kernels.sampling_reference import COUNT_MASK, GREEDY_BELOW

SEGMENT = 1024
CANDIDATE_TILE = 8192  # scores that `_find_cutoff` holds at a time
BIAS_TILE = 128
TOKEN_TILE = 256
FILTERS = ("temperatures", "top_ks", "top_ps", "min_ps")
FLOOR_SLACK = tl.constexpr(1e-3)  # of a floor under the cutoff: more than rounding can amount to


def adjust(logits: Tensor, adjustments: Adjustments, out: Tensor | None = None) -> Tensor:
    """See `kernels.sampling.adjust`."""
    a = adjustments
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    _penalize[rows, triton.cdiv(vocab, SEGMENT)](
        logits, out, a.repetition, a.presence, a.frequency, a.count_rows, a.token_counts, vocab, logits.stride(0),
        COUNT_MASK=COUNT_MASK, SEGMENT=SEGMENT, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    most = a.bias_ids.shape[1]
    if most > 0:
        _add_bias[rows, triton.cdiv(most, BIAS_TILE)](
            out, a.bias_rows, a.bias_ids, a.bias_values, vocab, most, a.bias_ids.stride(0),
            BIAS_TILE=BIAS_TILE, num_warps=4,
        )  # fmt: skip
    return out


def sample(logits: Tensor, rows: SamplingRows, *, filtered: bool, out: Tensor | None = None) -> Tensor:
    """See `kernels.sampling.sample`."""
    num_rows, vocab = logits.shape
    segments = triton.cdiv(vocab, SEGMENT)
    if out is None:
        out = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    cutoffs = _cutoffs(logits, rows, segments) if filtered else logits
    best, best_ids = (
        torch.empty((num_rows, segments), dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.int32)
    )
    _choose[num_rows, segments](
        logits, rows.temperature, rows.seed, rows.sample_index, rows.position, cutoffs, best, best_ids,
        vocab, logits.stride(0), FILTERED=filtered, GREEDY_BELOW=GREEDY_BELOW, SEGMENT=SEGMENT, num_warps=4,
    )  # fmt: skip
    block = triton.next_power_of_2(segments)
    _pick[num_rows,](best, best_ids, out, vocab, segments, BLOCK=block, num_warps=1)
    return out


def _cutoffs(logits: Tensor, rows: SamplingRows, segments: int) -> Tensor:
    """The least score that each row keeps, `[rows]` float32."""
    (num_rows, vocab), device = logits.shape, logits.device
    tops, masses = torch.empty((2, num_rows, segments), dtype=torch.float32, device=device)
    found = torch.empty((4, num_rows), dtype=torch.float32, device=device)
    bests, totals, floors, cutoffs = found[0], found[1], found[2], found[3]
    candidates = torch.empty((num_rows, segments, SEGMENT), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, segments), dtype=torch.int32, device=device)
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    block = triton.next_power_of_2(segments)
    _summarize[num_rows, segments](
        logits, rows.temperature, tops, masses, vocab, logits.stride(0),
        GREEDY_BELOW=GREEDY_BELOW, SEGMENT=SEGMENT, num_warps=4,
    )  # fmt: skip
    _find_floor[num_rows,](
        *filters, tops, masses, bests, totals, floors, vocab, segments,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, num_warps=16,
    )  # fmt: skip
    _collect[num_rows, segments](
        logits, *filters[:3], floors, candidates, counts, vocab, logits.stride(0),
        GREEDY_BELOW=GREEDY_BELOW, SEGMENT=SEGMENT, num_warps=4,
    )  # fmt: skip
    width = min(max(CANDIDATE_TILE // block, 1), SEGMENT)
    _find_cutoff[num_rows,](
        *filters, bests, totals, candidates, counts, cutoffs, vocab, segments,
        GREEDY_BELOW=GREEDY_BELOW, SEGMENT=SEGMENT, BLOCK=block, WIDTH=width, num_warps=8,
    )  # fmt: skip
    return cutoffs


# ---- single tokens' logits


@triton.jit(do_not_specialize_on_alignment=["repetition", "presence", "frequency", "count_rows"])
def _penalize(
    logits, out, repetition, presence, frequency, count_rows, token_counts, vocab, stride,
    COUNT_MASK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SEGMENT + tl.arange(0, SEGMENT)
    mask = tokens < vocab
    values = tl.load(logits + row * stride + tokens, mask=mask, other=0.0).to(tl.float32)
    count_row = tl.load(count_rows + row).to(tl.int64)
    if count_row >= 0:
        factor = tl.load(repetition + row)
        counts = tl.load(token_counts + count_row * vocab + tokens, mask=mask, other=0)
        repeated = tl.where(values > 0, tl.div_rn(values, factor + tl.zeros_like(values)), values * factor)
        values = tl.where(counts != 0, repeated, values)
        occurrences = counts & COUNT_MASK
        penalties = tl.load(frequency + row) * occurrences.to(tl.float32) + tl.load(presence + row)
        values -= tl.where(occurrences > 0, penalties, 0.0)
    tl.store(out + row * vocab + tokens, values, mask=mask)


@triton.jit(
    do_not_specialize=["most", "stride_bias"], do_not_specialize_on_alignment=["bias_rows", "bias_ids", "bias_values"]
)
def _add_bias(out, bias_rows, bias_ids, bias_values, vocab, most, stride_bias, BIAS_TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    bias_row = tl.load(bias_rows + row).to(tl.int64)
    if bias_row < 0:
        return
    entries = tl.program_id(1) * BIAS_TILE + tl.arange(0, BIAS_TILE)
    tokens = tl.load(bias_ids + bias_row * stride_bias + entries, mask=entries < most, other=-1)
    mask = (tokens >= 0) & (tokens < vocab)
    biases = tl.load(bias_values + bias_row * stride_bias + entries, mask=mask, other=0.0)
    values = tl.load(out + row * vocab + tokens, mask=mask, other=0.0)
    tl.store(out + row * vocab + tokens, values + biases, mask=mask)


def count_tokens(token_counts: Tensor, count_rows: Tensor, token_ids: Tensor) -> None:
    """See `kernels.sampling.count_tokens`."""
    _count_tokens[count_rows.shape[0],](token_counts, count_rows, token_ids, token_counts.shape[1], num_warps=1)


@triton.jit(do_not_specialize_on_alignment=["count_rows", "token_ids"])
def _count_tokens(token_counts, count_rows, token_ids, vocab):
    row = tl.program_id(0)
    count_row, token = tl.load(count_rows + row).to(tl.int64), tl.load(token_ids + row)
    if (count_row >= 0) & (token >= 0):
        cell = token_counts + count_row * vocab + token
        tl.store(cell, tl.load(cell) + 1)


# ---- logprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, out: TopLogprobs) -> None:
    """See `kernels.sampling.token_logprobs`."""
    (rows, vocab), device = logits.shape, logits.device
    segments = triton.cdiv(vocab, SEGMENT)
    tops, masses = torch.empty((2, rows, segments), dtype=torch.float32, device=device)
    _measure[rows, segments](logits, tops, masses, vocab, logits.stride(0), SEGMENT=SEGMENT, num_warps=4)
    best = logits.topk(num_top, dim=-1)
    _normalize[rows,](
        logits, token_ids, tops, masses, best.values, best.indices, *out, logits.stride(0), vocab, segments, num_top,
        out.top.stride(0), BLOCK=triton.next_power_of_2(segments), MAX_TOP=MAX_TOP, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["masses"])
def _measure(logits, tops, masses, vocab, stride, SEGMENT: tl.constexpr):
    """Every segment's greatest logit, and its mass relative to that."""
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    tokens = segment * SEGMENT + tl.arange(0, SEGMENT)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(values, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * segments + segment, top)
    tl.store(masses + row * segments + segment, tl.sum(tl.exp(values - base), axis=0))


@triton.jit(
    do_not_specialize=["num_top", "stride_out"],
    do_not_specialize_on_alignment=[
        "token_ids", "masses", "best_values", "best_indices", "chosen", "top_ids", "top"
    ],
)  # fmt: skip
def _normalize(
    logits, token_ids, tops, masses, best_values, best_indices, chosen, top_ids, top, stride, vocab, segments, num_top,
    stride_out, BLOCK: tl.constexpr, MAX_TOP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK)
    mask = entries < segments
    segment_tops = tl.load(tops + row * segments + entries, mask=mask, other=float("-inf"))
    segment_masses = tl.load(masses + row * segments + entries, mask=mask, other=0.0)
    best = tl.max(segment_tops, axis=0)
    normalizer = best + tl.log(tl.sum(segment_masses * tl.exp(segment_tops - best), axis=0))
    token = tl.maximum(tl.load(token_ids + row), 0)
    tl.store(chosen + row, tl.load(logits + row * stride + token).to(tl.float32) - normalizer)
    ranks = tl.arange(0, MAX_TOP)
    wanted = ranks < num_top
    values = tl.load(best_values + row * num_top + ranks, mask=wanted, other=0.0).to(tl.float32)
    indices = tl.load(best_indices + row * num_top + ranks, mask=wanted, other=0)
    tl.store(top + row * stride_out + ranks, values - normalizer, mask=wanted)
    tl.store(top_ids + row * stride_out + ranks, indices.to(tl.int32), mask=wanted)


# ---- tokens that only the device knows


def take_sampled(token_ids: Tensor, sources: Tensor, sampled: Tensor, out: Tensor | None = None) -> Tensor:
    """See `kernels.sampling.take_sampled`."""
    count = token_ids.shape[0]
    if out is None:
        out = torch.empty((count,), dtype=torch.int64, device=token_ids.device)
    _take_sampled[triton.cdiv(count, TOKEN_TILE),](
        token_ids, sources, sampled, out, count, TOKEN_TILE=TOKEN_TILE, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ids", "sources", "sampled"])
def _take_sampled(token_ids, sources, sampled, out, count, TOKEN_TILE: tl.constexpr):
    rows = tl.program_id(0) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    mask = rows < count
    source = tl.load(sources + rows, mask=mask, other=-1)
    known = tl.load(token_ids + rows, mask=mask, other=0)
    found = tl.load(sampled + source, mask=source >= 0, other=0)
    tl.store(out + rows, tl.where(source < 0, known, tl.maximum(found, 0)), mask=mask)


# ---- the token


@triton.jit
def _values(logits, row, tokens, vocab, stride):
    """Of one segment; −inf past the vocabulary."""
    return tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _scores(logits, temperature, row, tokens, vocab, stride):
    values = _values(logits, row, tokens, vocab, stride)
    return tl.div_rn(values, temperature + tl.zeros_like(values))


@triton.jit
def _gumbel(groups, seed, index, position):
    """Noise of tokens 4 · group + lane, as `kernels.philox`: `[groups]` → `[4 · groups]`."""
    zeros = groups * 0
    w0, w1, w2, w3 = tl.philox(seed, groups, position.to(tl.int32) + zeros, index.to(tl.int32) + zeros, zeros)
    bits = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape((4 * groups.shape[0],))
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "seeds", "indices", "positions", "cutoffs"])
def _choose(
    logits, temperatures, seeds, indices, positions, cutoffs, best, best_ids, vocab, stride,
    FILTERED: tl.constexpr, GREEDY_BELOW: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The best noisy score of each segment that is not below the row's cutoff, and its token.

    A segment with NaN or +inf in it gives +inf and the token −1, which wins over any other.
    """
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    tokens = segment * SEGMENT + tl.arange(0, SEGMENT)
    temperature = tl.load(temperatures + row)
    values = _values(logits, row, tokens, vocab, stride)
    is_broken = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), axis=0) > 0
    if temperature < GREEDY_BELOW:
        noisy = values
    else:
        scores = tl.div_rn(values, temperature + tl.zeros_like(values))
        groups = segment * (SEGMENT // 4) + tl.arange(0, SEGMENT // 4)
        seed, index, position = tl.load(seeds + row), tl.load(indices + row), tl.load(positions + row)
        noisy = scores + _gumbel(groups, seed, index, position)
        if FILTERED:
            noisy = tl.where(scores >= tl.load(cutoffs + row), noisy, float("-inf"))
    top = tl.max(noisy, axis=0)
    token = tl.min(tl.where(noisy == top, tokens, vocab), axis=0)
    tl.store(best + row * segments + segment, tl.where(is_broken, float("inf"), top))
    tl.store(best_ids + row * segments + segment, tl.where(is_broken, -1, token))


@triton.jit
def _pick(best, best_ids, out, vocab, segments, BLOCK: tl.constexpr):
    """The lowest token id with the best score of all segments; −1 for a row that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK)
    mask = entries < segments
    values = tl.load(best + row * segments + entries, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + row * segments + entries, mask=mask, other=vocab)
    top = tl.max(values, axis=0)
    token = tl.min(tl.where(values == top, ids, vocab), axis=0)
    tl.store(out + row, tl.where(top == float("-inf"), -1, token).to(tl.int64))


# ---- the cutoff of filtered rows


@triton.jit
def _is_searched(temperature, top_k, top_p, vocab, GREEDY_BELOW: tl.constexpr):
    """Whether the row's cutoff takes a search: min-p alone does not."""
    return (temperature >= GREEDY_BELOW) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "masses"])
def _summarize(
    logits, temperatures, tops, masses, vocab, stride, GREEDY_BELOW: tl.constexpr, SEGMENT: tl.constexpr
):  # fmt: skip
    """Every segment's greatest score, and its mass relative to that score."""
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    if temperature < GREEDY_BELOW:
        return
    scores = _scores(logits, temperature, row, segment * SEGMENT + tl.arange(0, SEGMENT), vocab, stride)
    top = tl.max(scores, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * segments + segment, top)
    tl.store(masses + row * segments + segment, tl.sum(tl.exp(scores - base), axis=0))


@triton.jit
def _log(probability):
    """−inf of 0."""
    return tl.where(probability > 0, tl.log(tl.maximum(probability, 1e-37)), float("-inf"))


@triton.jit(do_not_specialize_on_alignment=[*FILTERS, "masses", "bests", "totals", "floors"])
def _find_floor(
    temperatures, top_ks, top_ps, min_ps, tops, masses, bests, totals, floors, vocab, segments,
    GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row's greatest score, its mass relative to that score, and a floor under its cutoff.

    With top-k the floor is the k-th greatest of the segments' greatest scores. With top-p alone: all tokens less likely
    than (1 - top_p) / vocab have together less mass than 1 - top_p, so none of them is needed; nor is what min-p drops.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if temperature < GREEDY_BELOW:
        return
    entries = tl.arange(0, BLOCK)
    mask = entries < segments
    segment_tops = tl.load(tops + row * segments + entries, mask=mask, other=float("-inf"))
    segment_masses = tl.load(masses + row * segments + entries, mask=mask, other=0.0)
    best = tl.max(segment_tops, axis=0)
    total = tl.sum(segment_masses * tl.exp(segment_tops - best), axis=0)
    if (top_k > 0) & (top_k < vocab):
        ranks = tl.sum((segment_tops[None, :] >= segment_tops[:, None]).to(tl.int32), axis=1)
        floor = tl.max(tl.where(ranks >= top_k, segment_tops, float("-inf")), axis=0)
    else:
        nucleus = tl.log(total) + _log((1.0 - top_p) / vocab)
        floor = best + tl.minimum(tl.maximum(nucleus, _log(tl.load(min_ps + row))), 0.0) - FLOOR_SLACK
    tl.store(bests + row, best)
    tl.store(totals + row, total)
    tl.store(floors + row, floor)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "floors"])
def _collect(
    logits, temperatures, top_ks, top_ps, floors, candidates, counts, vocab, stride,
    GREEDY_BELOW: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Of each segment the scores that are not below the floor, in order, and their number."""
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if not _is_searched(temperature, top_k, top_p, vocab, GREEDY_BELOW):
        return
    tokens = segment * SEGMENT + tl.arange(0, SEGMENT)
    scores = _scores(logits, temperature, row, tokens, vocab, stride)
    kept = ((scores >= tl.load(floors + row)) & (scores > float("-inf"))).to(tl.int32)
    places = tl.cumsum(kept, axis=0) - 1
    tl.store(candidates + (row * segments + segment) * SEGMENT + places, scores, mask=kept > 0)
    tl.store(counts + row * segments + segment, tl.sum(kept, axis=0))


@triton.jit
def _above(
    candidates, lengths, most, row, segments, value, best, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a row's candidates: number and mass of those above `value`, the least above, the greatest not above."""
    rows = (row * segments + tl.arange(0, BLOCK)) * SEGMENT
    number, mass = 0, 0.0
    above, below = float("inf"), float("-inf")
    for first in range(0, most, WIDTH):
        places = first + tl.arange(0, WIDTH)
        mask = places[None, :] < lengths[:, None]
        scores = tl.load(candidates + rows[:, None] + places[None, :], mask=mask, other=float("-inf"))
        higher = scores > value
        number += tl.sum(tl.sum(higher.to(tl.int32), axis=1), axis=0)
        mass += tl.sum(tl.sum(tl.where(higher, tl.exp(scores - best), 0.0), axis=1), axis=0)
        above = tl.minimum(above, tl.min(tl.min(tl.where(higher, scores, float("inf")), axis=1), axis=0))
        below = tl.maximum(below, tl.max(tl.max(tl.where(higher, float("-inf"), scores), axis=1), axis=0))
    return number, mass, above, below


@triton.jit
def _search(
    candidates, lengths, most, row, segments, low, best, number_limit, mass_limit,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The least candidate, from the candidate `low` on, with fewer and less mass above it than the limits."""
    high = best
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where((middle >= low) & (middle < high), middle, low)
        number, mass, above, below = _above(
            candidates, lengths, most, row, segments, middle, best, SEGMENT, BLOCK, WIDTH
        )
        kept = (number < number_limit) & (mass < mass_limit)
        high = tl.where(kept, below, high)
        low = tl.where(kept, low, above)
    return low


@triton.jit(do_not_specialize_on_alignment=[*FILTERS, "bests", "totals", "cutoffs"])
def _find_cutoff(
    temperatures, top_ks, top_ps, min_ps, bests, totals, candidates, counts, cutoffs, vocab, segments,
    GREEDY_BELOW: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if temperature < GREEDY_BELOW:
        return
    best = tl.load(bests + row)
    cutoff = best + _log(tl.load(min_ps + row))
    is_finite = (best > float("-inf")) & (best < float("inf"))
    if is_finite & _is_searched(temperature, top_k, top_p, vocab, GREEDY_BELOW):
        entries = tl.arange(0, BLOCK)
        lengths = tl.load(counts + row * segments + entries, mask=entries < segments, other=0)
        most = tl.max(lengths, axis=0)
        total = tl.load(totals + row)
        _n, _m, low, _b = _above(candidates, lengths, most, row, segments, float("-inf"), best, SEGMENT, BLOCK, WIDTH)
        if (top_k > 0) & (top_k < vocab):
            low = _search(
                candidates, lengths, most, row, segments, low, best, top_k, float("inf"), SEGMENT, BLOCK, WIDTH
            )
            number, mass, _a, _b = _above(candidates, lengths, most, row, segments, low, best, SEGMENT, BLOCK, WIDTH)
            total = mass + (top_k - number).to(tl.float32) * tl.exp(low - best)
        if top_p < 1.0:
            low = _search(
                candidates, lengths, most, row, segments, low, best, vocab + 1, top_p * total, SEGMENT, BLOCK, WIDTH
            )
        cutoff = tl.maximum(cutoff, low)
    tl.store(cutoffs + row, tl.minimum(cutoff, best))
