"""Which adapter each row of one step's batch uses."""

from collections.abc import Sequence

import torch

from kernels.lora import rows_per_chunk
from kernels.table import Chunks, LoraRows, Segment, chunk_list, max_chunks


class LoraBatch(LoraRows):
    """The LoRA side of a forward batch: contiguous segments on the host and, on a GPU, its work list."""

    @classmethod
    def build(cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> "LoraBatch | None":
        """Of sequences in batch order.

        Args:
            slots: Each sequence's slot; −1 is the base model.
            lengths: Each sequence's rows in this step.
            device: Of the model.

        Returns:
            None if no sequence uses an adapter.
        """
        runs = segments(slots, lengths)
        if not runs:
            return None
        return cls(runs, _chunks(runs, lengths, device) if device.type == "cuda" else None)


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


def _chunks(runs: Sequence[Segment], lengths: Sequence[int], device: torch.device) -> Chunks:
    num_rows = sum(lengths)
    size = rows_per_chunk(num_rows)
    found = chunk_list(runs, size, max_chunks(num_rows, len(lengths), size), num_rows)
    return Chunks(torch.from_numpy(found).to(device, non_blocking=True), size)
