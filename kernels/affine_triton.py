# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Gains and offsets on a GPU: one program for each chunk of rows and block of columns. Semantics: `kernels.affine`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks, locate_columns
from kernels.delta import read_chunk
from kernels.table import NUM_MODULES, OFFSET_UNIT, AdapterTable, Chunks, Group

BLOCK = 1024
FLOATS_PER_UNIT = OFFSET_UNIT // 4


def apply_affine(
    y: Tensor, delta: Tensor | None, table: AdapterTable, layer: int, group: Group, chunks: Chunks
) -> None:
    """See `kernels.affine.apply_affine`."""
    blocks = column_blocks(group, BLOCK)
    _affine[blocks.num_blocks, chunks.list.shape[0]](
        y, y if delta is None else delta, table.weights.view(torch.float32), table.affines, chunks.list, layer,
        group.modules[0], table.num_layers, y.stride(0), y.shape[1], blocks.end0, blocks.end1, blocks.end2,
        MODULES=NUM_MODULES, UNIT=FLOATS_PER_UNIT, DELTA=delta is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _affine(
    y, delta, floats, affines, chunks, layer, first_module, num_layers, stride_y, width, end0, end1, end2,
    MODULES: tl.constexpr, UNIT: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, first, count = read_chunk(chunks, tl.program_id(1))
    if slot < 0:
        return
    index, begin, end, first_column = locate_columns(tl.program_id(0), end0, end1, end2, BLOCK)
    place = affines + ((slot * num_layers + layer) * MODULES + first_module + index) * 2
    gain_at, offset_at = tl.load(place), tl.load(place + 1)
    if (gain_at < 0) & (offset_at < 0):
        return
    columns = first_column + tl.arange(0, BLOCK)
    mask = columns < end - begin
    gains = floats + tl.multiple_of(gain_at.to(tl.int64) * UNIT, UNIT)
    offsets = floats + tl.multiple_of(offset_at.to(tl.int64) * UNIT, UNIT)
    gain = tl.load(gains + columns, mask=mask & (gain_at >= 0), other=1.0)
    offset = tl.load(offsets + columns, mask=mask & (offset_at >= 0), other=0.0)
    y += first * stride_y + begin + columns
    delta += first * width + begin + columns
    for _ in range(count):
        total = tl.load(y, mask=mask, other=0.0).to(tl.float32)
        if DELTA:
            total += tl.load(delta, mask=mask, other=0.0)
            tl.store(delta, tl.zeros((BLOCK,), tl.float32) * -1.0, mask=mask)  # tl.full takes −0 for 0
        tl.store(y, (total * gain + offset).to(y.dtype.element_ty), mask=mask)
        y += stride_y
        delta += width
