"""Which adapter each row of one step's batch uses."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from kernels.lora import rows_per_chunk
from kernels.table import Chunks, LoraRows, Segment, chunk_list, max_chunks


class LoraBatch(NamedTuple):
    """The LoRA side of a forward batch: contiguous segments on the host and, on a GPU, its work list.

    `rich`: those of `segments` whose adapters have more than the A and B of linears.
    """

    segments: tuple[Segment, ...]
    chunks: Chunks | None
    rich: tuple[Segment, ...] = ()

    @property
    def rows(self) -> LoraRows:
        """What the kernels know of it."""
        return LoraRows(self.segments, self.chunks)

    def part(self, start: int, end: int) -> "LoraBatch":
        """Of the rows `start` up to `end`, without a work list."""
        return LoraBatch(_part(self.segments, start, end), None, _part(self.rich, start, end))

    @classmethod
    def build(
        cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device, extras: Container[int] = ()
    ) -> "LoraBatch | None":
        """Of sequences in batch order.

        Args:
            slots: Each sequence's slot; −1 is the base model.
            lengths: Each sequence's rows in this step.
            device: Of the model.
            extras: Slots of adapters with extras (`Arena.extras`).

        Returns:
            None if no sequence uses an adapter.
        """
        runs = segments(slots, lengths)
        if not runs:
            return None
        chunks = _chunks(runs, lengths, device) if device.type == "cuda" else None
        return cls(runs, chunks, tuple(run for run in runs if run.slot in extras))


def segments(slots: Sequence[int], lengths: Sequence[int]) -> tuple[Segment, ...]:
    """Runs of rows of one adapter, in row order. See `LoraBatch.build`."""
    runs: list[Segment] = []
    end = 0
    for slot, length in zip(slots, lengths, strict=True):
        start, end = end, end + length
        if runs and runs[-1].slot == slot and runs[-1].end == start:
            runs[-1] = Segment(slot, runs[-1].start, end)
        elif slot >= 0 and length:
            runs.append(Segment(slot, start, end))
    return tuple(runs)


def _part(runs: Sequence[Segment], start: int, end: int) -> tuple[Segment, ...]:
    cut = (Segment(slot, max(first - start, 0), min(last, end) - start) for slot, first, last in runs)
    return tuple(run for run in cut if run.start < run.end)


def _chunks(runs: Sequence[Segment], lengths: Sequence[int], device: torch.device) -> Chunks:
    num_rows = sum(lengths)
    size = rows_per_chunk(num_rows)
    found = chunk_list(runs, size, max_chunks(num_rows, len(lengths), size), num_rows)
    return Chunks(torch.from_numpy(found).to(device, non_blocking=True), size)
