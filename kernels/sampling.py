"""From logits to tokens on the device: penalties and bias, then temperature, top-k, top-p, min-p and Gumbel noise.

A row's token depends on that row alone, and nothing is read back: `adjust`, `sample`, `count_tokens` and
`token_logprobs` can all be part of a captured graph. The rules are the sampler's of the engine.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sampling_reference

PROMPT_BIT = 1 << 30  # in a token's count: it occurs in the prompt


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
        bias_ids: `[rows, most]` int32, distinct within a row, padded with −1.
        bias_values: `[rows, most]` float32, added; −inf forbids the token.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    count_rows: Tensor
    token_counts: Tensor
    bias_ids: Tensor
    bias_values: Tensor


class TopLogprobs(NamedTuple):
    """`chosen` `[rows]` float32; `top_ids` int64 and `top` float32 `[rows, num_top]`, best first."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def adjust(logits: Tensor, adjustments: Adjustments, out: Tensor | None = None) -> Tensor:
    """Penalties, then bias. Returns `[rows, vocab]` float32; `logits` `[rows, vocab]` stay as they are."""
    if logits.is_cuda:
        from kernels import sampling_triton

        return sampling_triton.adjust(logits, adjustments, out)
    result = sampling_reference.adjust(logits, adjustments)
    return result if out is None else out.copy_(result)


def sample(logits: Tensor, rows: SamplingRows, *, filtered: bool, out: Tensor | None = None) -> Tensor:
    """One token a row, `[rows]` int64.

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


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """Log-softmax of `logits` `[rows, vocab]` in float32 at `token_ids` `[rows]`, and at each row's `num_top` best."""
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, token_ids[:, None]) - normalizer).squeeze(1)
    best = logits.topk(num_top, dim=-1)
    return TopLogprobs(chosen, best.indices, best.values - normalizer)


def set_counts(token_counts: Tensor, row: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
    """Start a sequence's row of `[any, vocab]` int32 `token_counts` in place; ids are int64 on its device."""
    counts = token_counts[row].zero_()
    counts.scatter_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
    counts[prompt_ids] |= PROMPT_BIT


def count_tokens(token_counts: Tensor, count_rows: Tensor, token_ids: Tensor) -> None:
    """Add one output occurrence of `token_ids` `[rows]` to each row's counts, in place; rows at −1 are left out."""
    cells = count_rows.long().clamp(min=0) * token_counts.shape[1] + token_ids
    token_counts.view(-1).scatter_add_(0, cells, (count_rows >= 0).int())
