"""Every op of this package in plain PyTorch: what tests compare with, and what a CPU runs."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.table import MAX_RANK, AdapterTable, Group, ModuleExpand, Segment, ShrinkPart

FEW_ROWS = 16


def bgmv_shrink(x: Tensor, table: AdapterTable, layer: int, group: Group, row_slots: Tensor) -> Tensor:
    """Project each row of `x` down to its adapter's rank.

    Semantics: for every row t with slot s = row_slots[t] ≥ 0, module i of the group and r below its rank,
        Σ_p v[p, t, i, r] = Σ_k A[s, i][r, k] · x[t, k]
    in float32.

    Args:
        x: `[rows, in]` in the arena's dtype.
        row_slots: `[rows]` int32; −1 marks a base-model row.

    Returns:
        v: `[splits, rows, modules, MAX_RANK]` float32. What the formula does not name is undefined.
    """
    v = torch.empty((1, x.shape[0], len(group.modules), MAX_RANK), dtype=torch.float32, device=x.device)
    for rows, part in _rows_and_parts(table, layer, group, row_slots):
        shrunk = x[rows].float() @ part.a.float()
        for expand in part.expands:
            v[0, rows, expand.position, : expand.last - expand.first] = shrunk[:, expand.first : expand.last]
    return v


def bgmv_expand(y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, row_slots: Tensor) -> None:
    """Project `v` up and add it to `y`, in place.

    Semantics: for every row t with slot s = row_slots[t] ≥ 0, module i of the group and its columns c,
        y[t, c] += scale[s, i] · Σ_r (Σ_p v[p, t, i, r]) · B[s, i][r, c − columns[i]]
    with y taken as float32, and rounded once.

    Args:
        y: `[rows, columns[-1]]`, changed in place. Base-model rows and unadapted modules keep their bits.
        v: `[splits, rows, modules, MAX_RANK]` float32, as the shrink returns it.
        row_slots: `[rows]` int32; −1 marks a base-model row.
    """
    for rows, part in _rows_and_parts(table, layer, group, row_slots):
        for expand in part.expands:
            shrunk = v[:, rows, expand.position, : expand.last - expand.first].sum(0)
            total = y[rows, expand.begin : expand.end].float() + expand.scale * (shrunk @ expand.b.float())
            y[rows, expand.begin : expand.end] = total.to(y.dtype)


def _rows_and_parts(
    table: AdapterTable, layer: int, group: Group, row_slots: Tensor
) -> Iterator[tuple[Tensor, ShrinkPart]]:
    for slot in sorted({slot for slot in row_slots.tolist() if slot >= 0}):
        rows = (row_slots == slot).nonzero().squeeze(1)
        for part in table.parts(slot, layer, group):
            yield rows, part


def rounded_sum(y: Tensor, delta: Tensor | None) -> Tensor:
    """y plus what adapters add to it (float32), rounded once to y's dtype; y itself without a delta."""
    return y if delta is None else (y.to(torch.promote_types(y.dtype, delta.dtype)) + delta).to(y.dtype)


# The ops on segments promise the same; they differ in the rows they are fast for.
sgmv_shrink = bgmv_shrink
sgmv_expand = bgmv_expand


def add_lora(y: Tensor, x: Tensor, table: AdapterTable, layer: int, group: Group, segments: Sequence[Segment]) -> None:
    """Shrink and expand at once, with as few calls into PyTorch as the segments allow: the path that serves on a CPU.

    Semantics: those of `bgmv_shrink` followed by `bgmv_expand`, for the rows that `segments` lists.
    """
    if y.dtype == torch.float32:
        _add_segments(y, x, table, layer, group, segments)
        return
    # float() copies the weights too, but products in half precision would round between shrink and expand.
    total = y.float()
    _add_segments(total, x.float(), table, layer, group, segments)
    y.copy_(total)


def _add_segments(
    y: Tensor, x: Tensor, table: AdapterTable, layer: int, group: Group, segments: Sequence[Segment]
) -> None:
    threads = torch.get_num_threads()
    try:
        for slot, start, end in segments:
            # Waking a second thread costs more than it takes off a short segment's products.
            torch.set_num_threads(1 if end - start <= FEW_ROWS else threads)
            for a, expands in table.parts(slot, layer, group):
                _add_part(y[start:end], x[start:end], a, expands)
    finally:
        torch.set_num_threads(threads)


def _add_part(y: Tensor, x: Tensor, a: Tensor, expands: Sequence[ModuleExpand]) -> None:
    """All float32 but the weights: y `[rows, columns[-1]]` changed in place, x `[rows, in]`, a `[in, sum of ranks]`."""
    v = torch.mm(x, a.float())
    for _, b, scale, first, last, begin, end in expands:
        y[:, begin:end].addmm_(v[:, first:last], b.float(), alpha=scale)
