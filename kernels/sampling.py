"""From logits to tokens on the device: penalties and bias, then temperature, top-k, top-p, min-p and Gumbel noise.

A row's token depends on that row alone, and nothing is read back: `adjust`, `sample`, `count_tokens` and
`token_logprobs` can all be part of a captured graph. The rules are the sampler's of the engine.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sampling_reference

MAX_TOP = 32
PROMPT_BIT = 1 << 30  # in a token's count: it occurs in the prompt
NOT_FINITE = -1  # stands for the token of a row with NaN or +inf in it, or with nothing but −inf


class SamplingRows(NamedTuple):
    """How each row is sampled; every field is `[rows]` on the logits' device.

    Attributes:
        temperature: float32; below 1e-5 the row is greedy (argmax, the lowest token id among equals).
        top_k: int32, 0 or less for no limit.
        top_p: float32, 1 or more for no limit.
        min_p: float32, 0 for no limit.
        seed: int64, 64 bits.
        sample_index: int64, of the sequence among its request's n.
        position: int64, number of output tokens before this one.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor


class Adjustments(NamedTuple):
    """What changes single tokens' logits before the temperature. `rows` of these are the batch's.

    Attributes:
        repetition: `[rows]` float32, 1 for none; divides a seen token's logit if positive, else multiplies it.
        presence, frequency: `[rows]` float32, 0 for none; subtracted once and per occurrence, output tokens only.
        count_rows: `[rows]` int32, each row's own row of `token_counts`, −1 for a row without penalties.
        token_counts: `[any, vocab]` int32, output occurrences plus `PROMPT_BIT` (see `set_counts`, `count_tokens`).
        bias_rows: `[rows]` int32, each row's own row of `bias_ids`, −1 for a row without biases.
        bias_ids: `[any, most]` int32, distinct within a row, padded with −1; last dimension contiguous.
        bias_values: `[any, most]` float32 of the same strides, added; −inf forbids the token.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    count_rows: Tensor
    token_counts: Tensor
    bias_rows: Tensor
    bias_ids: Tensor
    bias_values: Tensor


class TopLogprobs(NamedTuple):
    """`chosen` `[rows]` float32; `top_ids` int32 and `top` float32 `[rows, num_top or more]`, best first."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def adjust(logits: Tensor, adjustments: Adjustments, out: Tensor | None = None) -> Tensor:
    """Penalties, then bias. Returns `[rows, vocab]` float32; `logits` `[rows, vocab]` stay as they are.

    Every operation is rounded to float32 once, so that the result has the reference's bits.
    """
    if logits.is_cuda:
        from kernels import sampling_triton

        return sampling_triton.adjust(logits, adjustments, out)
    result = sampling_reference.adjust(logits, adjustments)
    return result if out is None else out.copy_(result)


def sample(logits: Tensor, rows: SamplingRows, *, filtered: bool, out: Tensor | None = None) -> Tensor:
    """One token a row, `[rows]` int64, or NOT_FINITE, which changes no other row.

    Semantics: scores = logits / temperature; top-k keeps the k best scores and their equals, top-p of these the best
    whose better ones have less than top_p of the mass (of the k best), and their equals, min-p those of at least
    min_p times the best one's probability; the token is the argmax of score + Gumbel noise over what is kept, the noise
    Philox(seed, sample_index, position, token id). Masses are summed in float32, so which side of top_p a token falls
    on may differ from the reference's by that rounding.

    Args:
        logits: `[rows, vocab]` float32 or half precision, last dimension contiguous.
        rows: How.
        filtered: Whether any row may have top-k, top-p or min-p; without, they are not looked at.
        out: `[rows]` int64, or None to allocate.
    """
    if logits.is_cuda:
        from kernels import sampling_triton

        return sampling_triton.sample(logits, rows, filtered=filtered, out=out)
    tokens = sampling_reference.sample(logits, rows, filtered=filtered)
    return tokens if out is None else out.copy_(tokens)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, out: TopLogprobs | None = None) -> TopLogprobs:
    """Log-softmax in float32 at one token of each row, and at each row's `num_top` best.

    Args:
        logits: `[rows, vocab]` float32 or half precision, last dimension contiguous.
        token_ids: `[rows]` int64; what stands beside NOT_FINITE is undefined.
        num_top: At most `MAX_TOP`; more than the vocabulary has gives all.
        out: Where to write the first columns, or None to allocate.
    """
    rows, num_top = logits.shape[0], min(num_top, logits.shape[1])
    if out is None:
        chosen, top = (
            torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in [(rows,), (rows, num_top)]
        )
        out = TopLogprobs(chosen, torch.empty((rows, num_top), dtype=torch.int32, device=logits.device), top)
    if logits.is_cuda:
        from kernels import sampling_triton

        sampling_triton.token_logprobs(logits, token_ids, num_top, out)
    else:
        sampling_reference.token_logprobs(logits, token_ids, num_top, out)
    return out


def set_counts(token_counts: Tensor, prompt_cells: Tensor, output_cells: Tensor) -> None:
    """Mark the prompt's tokens and add the output's, in place; the rows concerned start at zero.

    Args:
        token_counts: `[any, vocab]` int32.
        prompt_cells, output_cells: `[any]` int64, row · vocab + token id; a row's prompt before its output.
    """
    flat = token_counts.view(-1)
    flat.scatter_(0, prompt_cells, PROMPT_BIT)
    one = torch.ones((), dtype=torch.int32, device=flat.device)
    flat.scatter_add_(0, output_cells, one.expand(output_cells.shape[0]))


def count_tokens(token_counts: Tensor, count_rows: Tensor, token_ids: Tensor) -> None:
    """Add one output occurrence of `token_ids` `[rows]` to each row's counts, in place.

    Rows at −1 and rows whose token is NOT_FINITE are left out; the others differ in `count_rows` `[rows]` int32.
    """
    if token_counts.is_cuda:
        from kernels import sampling_triton

        sampling_triton.count_tokens(token_counts, count_rows, token_ids)
    else:
        sampling_reference.count_tokens(token_counts, count_rows, token_ids)


def take_sampled(token_ids: Tensor, sources: Tensor, sampled: Tensor, out: Tensor | None = None) -> Tensor:
    """The tokens of a batch, some of which only the device knows. Returns `[tokens]` int64.

    Semantics: out[i] = token_ids[i] where sources[i] < 0, else sampled[sources[i]], and 0 for NOT_FINITE: what follows
    it is thrown away, but must be a token.

    Args:
        token_ids, sources: `[tokens]` int64.
        sampled: `[any]` int64, of an earlier `sample`.
        out: `[tokens]` int64, or None to allocate.
    """
    if token_ids.is_cuda:
        from kernels import sampling_triton

        return sampling_triton.take_sampled(token_ids, sources, sampled, out)
    tokens = sampling_reference.take_sampled(token_ids, sources, sampled)
    return tokens if out is None else out.copy_(tokens)
