"""A tensor on the device with one row for each slot, which steps read."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import torch
from torch import Tensor


class SlotRows:
    """Rewrites rows on the compute stream: steps launched before read what was there.

    Args:
        rows: `[slots, …]` on the device.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._staging: Tensor | None = None
        self._staged: dict[int, torch.cuda.Event] = {}
        if rows.is_cuda:
            self._staging = torch.zeros(rows.shape, dtype=rows.dtype, pin_memory=True)

    def write(self, slot: int, row: Tensor) -> None:
        """`row`, on the CPU, for the steps launched from now on."""
        if self._staging is None:
            self._rows[slot] = row
            return
        if slot in self._staged:
            self._staged[slot].synchronize()  # the last copy out of this staging row; long done
        self._staging[slot] = row
        self._rows[slot].copy_(self._staging[slot], non_blocking=True)
        self._staged[slot] = torch.cuda.current_stream().record_event()
