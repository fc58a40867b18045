"""Which adapter each row of one step's batch uses."""

from collections.abc import Sequence

import torch

from kernels.table import LoraRows, Segment


class LoraBatch(LoraRows):
    """The LoRA side of a forward batch: contiguous segments on the host and, on a GPU, every row's slot."""

    @classmethod
    def build(
        cls, slots: Sequence[int], lengths: Sequence[int], num_decodes: int, device: torch.device
    ) -> "LoraBatch | None":
        """Of sequences in batch order.

        Args:
            slots: Each sequence's slot; −1 is the base model.
            lengths: Each sequence's rows in this step.
            num_decodes: How many sequences, from the first, have one row each.

        Returns:
            None if no sequence uses an adapter.
        """
        segments: list[Segment] = []
        end = 0
        for slot, length in zip(slots, lengths, strict=True):
            start, end = end, end + length
            if segments and segments[-1].slot == slot and segments[-1].end == start:
                segments[-1] = Segment(slot, segments[-1].start, end)
            elif slot >= 0 and length:
                segments.append(Segment(slot, start, end))
        if not segments:
            return None
        row_slots = _row_slots(slots, lengths, device) if device.type == "cuda" else None
        return cls(tuple(segments), row_slots, num_decodes)


def _row_slots(slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """`[rows]` int32 on the device."""
    rows = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)
