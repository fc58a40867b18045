"""Logprobs on their way from the GPU: computed in pieces, copied out together, read with their step."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from inference_service.types import MAX_LOGPROBS, TokenLogprobs
from kernels.sampling import TopLogprobs, token_logprobs

NUM_HOST_BUFFERS = 2  # a step is read before the next but one is launched


class Wanted(NamedTuple):
    """Whose logprobs a step gives, with the number of alternatives of each.

    Attributes:
        rows: Of the sampled rows: (row, alternatives).
        prompts: For every chunk: (the prompt tokens it scores, alternatives).
    """

    rows: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[Items[int], int], ...]

    @property
    def num_entries(self) -> int:
        return len(self.rows) + sum(len(targets) for targets, _ in self.prompts)

    @property
    def num_top(self) -> int:
        """The most alternatives of any."""
        return max((num_top for _, num_top in (*self.rows, *self.prompts)), default=0)


class DeviceScores:
    """Buffers for the logprobs of one step: those of sampled tokens, then those of prompt tokens.

    Args:
        num_entries: The most that a step can want.
        device: The GPU.
    """

    def __init__(self, num_entries: int, device: torch.device) -> None:
        self._values = _buffers(num_entries, device)
        self._host = [_buffers(num_entries, None) for _ in range(NUM_HOST_BUFFERS)]
        self._turn = 0

    def compute(self, start: int, logits: Tensor, token_ids: Tensor, num_top: int) -> None:
        """Entries from `start` on, of `token_ids` `[rows]` by `logits` `[rows, vocab]`."""
        out = TopLogprobs(*(values[start : start + logits.shape[0]] for values in self._values))
        token_logprobs(logits, token_ids, num_top, out)

    def copy_out(self, count: int, num_top: int) -> TopLogprobs:
        """Where the host finds the first `count` entries once the current stream has come here."""
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        host = self._host[self._turn]
        # Whole rows: a copy of some columns would be staged, and waited for.
        for target, source in list(zip(host, self._values, strict=True))[: 3 if num_top else 1]:
            target[:count].copy_(source[:count], non_blocking=True)
        return TopLogprobs(host.chosen[:count], host.top_ids[:count, :num_top], host.top[:count, :num_top])


def read(values: TopLogprobs, token_ids: Iterable[int], num_tops: Iterable[int]) -> list[TokenLogprobs]:
    """Entries of `values` on the host, one for each of `token_ids`, with the wanted number of alternatives."""
    columns = (column.tolist() for column in values)
    return [
        TokenLogprobs(token, chosen, tuple(zip(top_ids[:num_top], top[:num_top], strict=True)))
        for token, num_top, chosen, top_ids, top in zip(token_ids, num_tops, *columns, strict=True)
    ]


def _buffers(num_entries: int, device: torch.device | None) -> TopLogprobs:
    """On the device, or page-locked on the host."""
    shape, pinned = (num_entries, MAX_LOGPROBS), device is None
    return TopLogprobs(
        torch.zeros(num_entries, dtype=torch.float32, device=device, pin_memory=pinned),
        torch.zeros(shape, dtype=torch.int32, device=device, pin_memory=pinned),
        torch.zeros(shape, dtype=torch.float32, device=device, pin_memory=pinned),
    )
