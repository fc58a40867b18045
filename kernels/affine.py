"""Gains and offsets of adapters' linears: the door and the reference."""

import torch
from torch import Tensor

from kernels.table import AdapterTable, Chunks, Group


def apply_affine(
    y: Tensor, delta: Tensor | None, table: AdapterTable, layer: int, group: Group, chunks: Chunks
) -> None:
    """Semantics: y[t, c] = gain[c] · (y[t, c] + delta[t, c]) + offset[c], in float32, rounded once, in place, and then
    delta[t, c] = −0, which changes no bit of what it is added to.

    That is for every row t of an adapter that has a gain or an offset (else 1 and 0) for a module of the group, and the
    module's columns c. All else keeps its bits.

    Args:
        y: `[rows, columns[-1]]` in the arena's dtype, what the base linears give, last dimension contiguous.
        delta: `[rows, columns[-1]]` float32, contiguous, what A and B add; None if that has been added.
        table: The adapters in their slots.
        layer: Layer of the base model.
        group: The modules that `y` packs.
        chunks: Cover all rows.
    """
    if y.is_cuda:
        from kernels import affine_triton

        affine_triton.apply_affine(y, delta, table, layer, group, chunks)
    else:
        apply_affine_reference(y, delta, table, layer, group, chunks)


def apply_affine_reference(
    y: Tensor, delta: Tensor | None, table: AdapterTable, layer: int, group: Group, chunks: Chunks
) -> None:
    """See `apply_affine`."""
    floats = table.weights.view(torch.float32)
    for slot, start, end in chunks.segments():
        places: list[list[int]] = table.affines[slot, layer].tolist()
        for module, first, last in zip(group.modules, group.columns[:-1], group.columns[1:], strict=True):
            gain, offset = (floats[at * 4 : at * 4 + last - first] if at >= 0 else None for at in places[module])
            if gain is None and offset is None:
                continue
            total = y[start:end, first:last].to(torch.promote_types(y.dtype, torch.float32))
            if delta is not None:
                total = total + delta[start:end, first:last]
                delta[start:end, first:last] = -0.0
            total = total if gain is None else total * gain
            y[start:end, first:last] = total if offset is None else total + offset
