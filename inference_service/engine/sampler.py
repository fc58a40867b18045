"""From logits to tokens: penalties, bias, temperature, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

A row's token depends on that row only, never on the other rows of the batch.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from inference_service.engine.step import NOT_FINITE
from inference_service.types import Sampling, TokenLogprobs
from kernels.philox import LANES, token_noise

GREEDY_BELOW = 1e-5  # of temperature: dividing by less overflows
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Row:
    """How one row of logits is sampled.

    Attributes:
        index: Of the sequence among its request's n.
        position: Number of output tokens before this one.
        prompt_ids, output_ids: For penalties; may be empty if there are none.
        forbidden_ids: Tokens that must not be chosen (EOS and stop ids before min_tokens).
        logprobs: Top alternatives wanted beside the chosen token's logprob, None for no logprobs.
    """

    sampling: Sampling
    index: int
    position: int
    prompt_ids: Items[int] = ()
    output_ids: Items[int] = ()
    forbidden_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def is_adjusted(self) -> bool:
        """Whether single tokens' logits change before the temperature."""
        return has_penalties(self.sampling) or bool(self.sampling.logit_bias) or bool(self.forbidden_ids)


def is_filtered(s: Sampling) -> bool:
    """Whether some tokens may be left out by their probability."""
    return s.temperature >= GREEDY_BELOW and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)


def has_penalties(s: Sampling) -> bool:
    """Whether the tokens so far change the next one's logits."""
    return (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1.0, 0.0, 0.0)


class Sampled(NamedTuple):
    """One token per row, or NOT_FINITE, and its logprobs where wanted."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: torch.Tensor, rows: Items[Row]) -> Sampled:
    """Choose one token per row of `logits` `[rows, vocab]` float32 (left as they are).

    A row with NaN or +inf in it, or with nothing but -inf, gives NOT_FINITE and no logprobs.
    """
    adjusted = _adjust(logits, rows) if any(row.is_adjusted for row in rows) else logits
    token_ids = adjusted.argmax(dim=-1)  # of a NaN if there is one
    is_finite = adjusted.gather(1, token_ids[:, None]).squeeze(1).isfinite().tolist()
    random = [i for i, row in enumerate(rows) if is_finite[i] and not row.is_greedy]
    if random:
        chosen = _sample_random(adjusted[random] if len(random) < len(rows) else adjusted, [rows[i] for i in random])
        token_ids[random] = chosen.to(token_ids.device)
    ids = [token if finite else NOT_FINITE for token, finite in zip(token_ids.tolist(), is_finite, strict=True)]
    wanted = [row.logprobs if finite else None for row, finite in zip(rows, is_finite, strict=True)]
    return Sampled(ids, _logprobs(logits, ids, wanted))


def token_logprobs(logits: torch.Tensor, token_ids: Items[int], num_top: int) -> list[TokenLogprobs]:
    """Log-softmax of `logits` `[rows, vocab]` at each row's token, and the `num_top` best tokens, best first."""
    normalizer = logits.logsumexp(dim=-1)  # [rows]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = (logits.gather(1, ids[:, None]).squeeze(1) - normalizer).tolist()
    if num_top == 0:
        return [TokenLogprobs(*pair) for pair in zip(token_ids, chosen, strict=True)]
    best = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), (best.values - normalizer[:, None]).tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(top_ids, top_values, strict=True)))
        for token, logprob, (top_ids, top_values) in zip(token_ids, chosen, tops, strict=True)
    ]


def _logprobs(logits: torch.Tensor, ids: Items[int], wanted: Items[int | None]) -> list[TokenLogprobs | None]:
    rows = [i for i, count in enumerate(wanted) if count is not None]
    result: list[TokenLogprobs | None] = [None] * len(ids)
    if rows:
        most = max(count for count in wanted if count is not None)
        scored = token_logprobs(logits if len(rows) == len(ids) else logits[rows], [ids[i] for i in rows], most)
        for i, entry in zip(rows, scored, strict=True):
            result[i] = TokenLogprobs(entry.token_id, entry.logprob, entry.top[: wanted[i]])
    return result


# ---- single tokens' logits


def _adjust(logits: torch.Tensor, rows: Items[Row]) -> torch.Tensor:
    """A copy of `logits` with penalties, then bias, then forbidden tokens applied."""
    adjusted = logits.clone()
    for values, row in zip(adjusted, rows, strict=True):
        if has_penalties(row.sampling):
            _penalize(values, row)
        if row.sampling.logit_bias:
            ids = torch.tensor(list(row.sampling.logit_bias), device=logits.device)
            values[ids] += torch.tensor(list(row.sampling.logit_bias.values()), dtype=values.dtype, device=ids.device)
        if row.forbidden_ids:
            values[torch.tensor(row.forbidden_ids, device=logits.device)] = NEVER
    return adjusted


def _penalize(values: torch.Tensor, row: Row) -> None:
    """In place on one row `[vocab]`: repetition over prompt and output, then frequency and presence over output."""
    s = row.sampling
    if s.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array([*row.prompt_ids, *row.output_ids], np.int64))).to(values.device)
        old = values[seen]
        values[seen] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
    if row.output_ids and (s.frequency_penalty != 0.0 or s.presence_penalty != 0.0):
        ids, counts = np.unique(np.array(row.output_ids, np.int64), return_counts=True)
        penalty = np.float32(s.frequency_penalty) * counts.astype(np.float32) + np.float32(s.presence_penalty)
        values[torch.from_numpy(ids).to(values.device)] -= torch.from_numpy(penalty).to(values.device)


# ---- random rows


def _sample_random(logits: torch.Tensor, rows: Items[Row]) -> torch.Tensor:
    """argmax over kept tokens of logits / T + Gumbel noise. `logits` `[rows, vocab]` → `[rows]` int64."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=logits.device)
    scores = logits / temperatures[:, None]
    on_cpu = logits.device.type == "cpu"
    cutoffs = (cutoffs_by_filter if on_cpu else cutoffs_by_sort)(scores, [row.sampling for row in rows])
    return (_choose_by_row if on_cpu else _choose_at_once)(scores, cutoffs, rows)


def cutoffs_by_sort(scores: torch.Tensor, samplings: Items[Sampling]) -> torch.Tensor:
    """The least score that top-k, then top-p, then min-p keep in each row: `[rows, vocab]` → `[rows]`.

    Ties with the cutoff are kept, so that the order of equal tokens never matters. All rows at once, by sorting.
    """
    vocab = scores.shape[1]
    column = {name: [getattr(s, name) for s in samplings] for name in ("top_k", "top_p", "min_p")}
    top_k = torch.tensor([k if 0 < k < vocab else vocab for k in column["top_k"]], device=scores.device)
    top_p = torch.tensor(column["top_p"], dtype=torch.float32, device=scores.device)
    min_p = torch.tensor(column["min_p"], dtype=torch.float32, device=scores.device)
    ordered = scores.sort(dim=-1, descending=True).values
    in_top_k = torch.arange(vocab, device=scores.device) < top_k[:, None]
    probabilities = ordered.masked_fill(~in_top_k, NEVER).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of strictly better tokens
    kept = in_top_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    kept[:, 0] = True
    nucleus = ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1).squeeze(1)
    nucleus = torch.where((top_k < vocab) | (top_p < 1), nucleus, NEVER)
    return torch.maximum(nucleus, ordered[:, 0] + min_p.log())


def cutoffs_by_filter(scores: torch.Tensor, samplings: Items[Sampling]) -> torch.Tensor:
    """As `cutoffs_by_sort`, row by row and sorting only what can matter: fast on a CPU."""
    return torch.tensor([_cutoff(row, sampling) for row, sampling in zip(scores, samplings, strict=True)])


def _cutoff(scores: torch.Tensor, sampling: Sampling) -> float:
    """For one row `[vocab]`.

    Tokens less likely than (1 - top_p) / vocab have less mass than 1 - top_p together, so none is in the nucleus.
    """
    vocab, best, cutoff = scores.shape[0], float(scores.max()), NEVER
    if 0 < sampling.top_k < vocab:
        ordered = scores.topk(sampling.top_k).values
        cutoff = float(ordered[-1])
        normalizer = float(ordered.logsumexp(dim=0))
    elif sampling.top_p < 1:
        normalizer = float(scores.logsumexp(dim=0))
        floor = normalizer + float(np.log((1 - sampling.top_p) / vocab))
        ordered = scores[scores >= min(floor, best)].sort(descending=True).values
    if sampling.top_p < 1:
        probabilities = (ordered - normalizer).exp()
        before = probabilities.cumsum(dim=0) - probabilities
        cutoff = float(ordered[max(int((before < sampling.top_p).sum()), 1) - 1])
    return max(cutoff, best + float(np.log(sampling.min_p))) if sampling.min_p > 0 else cutoff


def _choose_by_row(scores: torch.Tensor, cutoffs: torch.Tensor, rows: Items[Row]) -> torch.Tensor:
    """Noise for kept tokens only; one row at a time stays in the CPU's cache."""
    return torch.tensor([_choose(*each) for each in zip(scores, cutoffs, rows, strict=True)])


def _choose(scores: torch.Tensor, cutoff: torch.Tensor, row: Row) -> int:
    vocab = scores.shape[0]
    if cutoff > NEVER and len(kept := (scores >= cutoff).nonzero().squeeze(1).numpy()) < vocab // (2 * LANES):
        words = token_noise(kept // LANES, *_counters(row))
        bits = np.choose(kept % LANES, words)
        noisy = scores[torch.from_numpy(kept)] + gumbel(torch.from_numpy(bits))
        return int(kept[int(noisy.argmax())])
    groups = np.arange(-(-vocab // LANES))
    words = token_noise(groups, *_counters(row))
    noise = gumbel(torch.from_numpy(np.stack(words, axis=-1).reshape(-1)[:vocab]))
    noise.add_(scores)
    return int((noise.masked_fill_(scores < cutoff, NEVER) if cutoff > NEVER else noise).argmax())


def _choose_at_once(scores: torch.Tensor, cutoffs: torch.Tensor, rows: Items[Row]) -> torch.Tensor:
    """All rows in one go, noise for every token: the obvious path, and the one for a GPU."""
    vocab, device = scores.shape[1], scores.device
    groups = torch.arange(-(-vocab // LANES), device=device)[None]
    counters = torch.from_numpy(np.stack([_counters(row) for row in rows], axis=1)).to(device)  # [3, rows, 1]
    words = token_noise(groups, *counters)
    noise = gumbel(
        torch.stack([word.expand(len(rows), -1) for word in words], dim=-1).reshape(len(rows), -1)[:, :vocab]
    )
    return noise.add_(scores).masked_fill_(scores < cutoffs[:, None], NEVER).argmax(dim=-1)


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise -log(-log(u)), u the midpoint of one of 2**23 cells (exact in float32)."""
    uniform = ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def _counters(row: Row) -> npt.NDArray[np.int64]:
    """Seed (its 64 bits as a signed integer), index and position, each of shape `[1]`."""
    seed = row.sampling.seed & 0xFFFFFFFFFFFFFFFF
    return np.array([[seed - (seed >> 63 << 64)], [row.index], [row.position]], np.int64)
