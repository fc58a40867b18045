"""Sampling in plain PyTorch, by sorting: what the kernels are compared with. Semantics: `kernels.sampling`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.philox import gumbel, token_bits

if TYPE_CHECKING:
    from kernels.sampling import Adjustments, SamplingRows, TopLogprobs

GREEDY_BELOW = 1e-5  # of temperature: dividing by less overflows
NEVER = float("-inf")
COUNT_MASK = (1 << 30) - 1
NOT_FINITE = -1


def adjust(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """See `kernels.sampling.adjust`."""
    a = adjustments
    adjusted = logits.float().clone()
    counted = a.count_rows >= 0
    counts = a.token_counts[a.count_rows.clamp(min=0).long()] * counted[:, None]
    repetition = a.repetition[:, None]
    repeated = torch.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
    adjusted = torch.where(counts != 0, repeated, adjusted)
    occurrences = counts & COUNT_MASK
    penalties = a.frequency[:, None] * occurrences + a.presence[:, None]
    adjusted = adjusted - torch.where(occurrences > 0, penalties, 0.0)
    for values, row in zip(adjusted, a.bias_rows.tolist(), strict=True):
        kept = a.bias_ids[row] >= 0
        if row >= 0:
            values[a.bias_ids[row][kept].long()] += a.bias_values[row][kept]
    return adjusted


def sample(logits: Tensor, rows: SamplingRows, *, filtered: bool) -> Tensor:
    """See `kernels.sampling.sample`."""
    logits = logits.float()
    greedy = rows.temperature < GREEDY_BELOW
    scores = logits / rows.temperature.masked_fill(greedy, 1.0)[:, None]
    noisy = scores + gumbel(token_bits(logits.shape[1], rows.seed, rows.sample_index, rows.position))
    if filtered:
        noisy = noisy.masked_fill(scores < cutoffs(scores, rows)[:, None], NEVER)
    best = logits.argmax(-1)  # of a NaN if there is one
    is_finite = logits.gather(1, best[:, None]).squeeze(1).isfinite()
    return torch.where(is_finite, torch.where(greedy, best, noisy.argmax(-1)), NOT_FINITE)


def cutoffs(scores: Tensor, rows: SamplingRows) -> Tensor:
    """The least score that top-k, then top-p, then min-p keep in each row: `[rows, vocab]` → `[rows]`."""
    vocab = scores.shape[1]
    top_k = torch.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)
    top_p = rows.top_p[:, None]
    ordered = scores.sort(dim=-1, descending=True).values
    in_top_k = torch.arange(vocab, device=scores.device) < top_k[:, None]
    probabilities = ordered.masked_fill(~in_top_k, NEVER).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of strictly better tokens
    kept = in_top_k & ((before < top_p) | (top_p >= 1))
    kept[:, 0] = True
    nucleus = ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1).squeeze(1)
    nucleus = torch.where((top_k < vocab) | (rows.top_p < 1), nucleus, NEVER)
    return torch.maximum(nucleus, ordered[:, 0] + rows.min_p.log())


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, out: TopLogprobs) -> None:
    """See `kernels.sampling.token_logprobs`."""
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    out.chosen.copy_((logits.gather(1, token_ids.clamp(min=0)[:, None]) - normalizer).squeeze(1))
    best = logits.topk(num_top, dim=-1)
    out.top_ids[:, :num_top] = best.indices.int()
    out.top[:, :num_top] = best.values - normalizer


def count_tokens(token_counts: Tensor, count_rows: Tensor, token_ids: Tensor) -> None:
    """See `kernels.sampling.count_tokens`."""
    counted = (count_rows >= 0) & (token_ids >= 0)
    cells = count_rows.long().clamp(min=0) * token_counts.shape[1] + token_ids.clamp(min=0)
    token_counts.view(-1).scatter_add_(0, cells, counted.int())


def take_sampled(token_ids: Tensor, sources: Tensor, sampled: Tensor) -> Tensor:
    """See `kernels.sampling.take_sampled`."""
    return torch.where(sources < 0, token_ids, sampled[sources.clamp(min=0)].clamp(min=0))
