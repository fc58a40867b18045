"""Sampling in plain PyTorch, by sorting: what the kernels are compared with. Semantics: `kernels.sampling`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.philox import gumbel, token_bits

if TYPE_CHECKING:
    from kernels.sampling import Adjustments, SamplingRows

GREEDY_BELOW = 1e-5  # of temperature: dividing by less overflows
NEVER = float("-inf")
COUNT_MASK = (1 << 30) - 1


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
    for values, ids, biases in zip(adjusted, a.bias_ids, a.bias_values, strict=True):
        kept = ids >= 0
        values[ids[kept].long()] += biases[kept]
    return adjusted


def sample(logits: Tensor, rows: SamplingRows, *, filtered: bool) -> Tensor:
    """See `kernels.sampling.sample`."""
    logits = logits.float()
    greedy = rows.temperature < GREEDY_BELOW
    scores = logits / rows.temperature.masked_fill(greedy, 1.0)[:, None]
    noisy = scores + gumbel(token_bits(logits.shape[1], rows.seed, rows.sample_index, rows.position))
    if filtered:
        noisy = noisy.masked_fill(scores < cutoffs(scores, rows)[:, None], NEVER)
    return torch.where(greedy, logits.argmax(-1), noisy.argmax(-1))


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
