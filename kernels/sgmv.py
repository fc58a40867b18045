# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Segmented gather matrix products: runs of rows that share an adapter (prefill), on tensor cores.

Semantics, shapes and dtypes: `kernels.reference`, under the same names. A program owns a tile of rows and visits the
distinct slots in it, highest first; it keeps only the rows of the slot at hand. So the work list is `row_slots` itself,
grids depend on the number of rows alone, and any order of rows is right (long runs are fast).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks, locate_columns
from kernels.table import MAX_RANK, NUM_MODULES, OFFSET_UNIT, AdapterTable, Group

BLOCK_ROWS = 64
BLOCK_RANK = 32
BLOCK_IN = 64
BLOCK_OUT = 128


def sgmv_shrink(x: Tensor, table: AdapterTable, layer: int, group: Group, row_slots: Tensor) -> Tensor:
    """See `kernels.reference.sgmv_shrink`."""
    num_rows, in_features = x.shape
    num_modules = len(group.modules)
    v = torch.empty((1, num_rows, num_modules, MAX_RANK), dtype=torch.float32, device=x.device)
    _shrink[triton.cdiv(num_rows, BLOCK_ROWS), num_modules](
        x, table.weights, table.entries, v, row_slots, num_rows, layer, group.modules[0],
        table.num_layers, x.stride(0), in_features, **_constants(table),
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_RANK=BLOCK_RANK, BLOCK_IN=BLOCK_IN,
    )  # fmt: skip
    return v


def sgmv_expand(y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, row_slots: Tensor) -> None:
    """See `kernels.reference.sgmv_expand`; `v` has one split.

    In half precision `v` enters the tensor cores as the sum of two halves, so that it is not rounded to one.
    """
    _, num_rows, num_modules, _ = v.shape
    blocks = column_blocks(group, BLOCK_OUT)
    _expand[triton.cdiv(num_rows, BLOCK_ROWS), blocks.num_blocks](
        y, v, table.weights, table.entries, table.scales, row_slots, num_rows, layer, group.modules[0],
        table.num_layers, y.stride(0), blocks.end0, blocks.end1, blocks.end2, **_constants(table),
        GROUP_SIZE=num_modules, BLOCK_ROWS=BLOCK_ROWS, BLOCK_RANK=BLOCK_RANK, BLOCK_OUT=BLOCK_OUT,
    )  # fmt: skip


def _constants(table: AdapterTable) -> dict[str, int]:
    return {"UNIT": OFFSET_UNIT // table.weights.element_size(), "MODULES": NUM_MODULES, "MAX_RANK": MAX_RANK}


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["row_slots"])
def _shrink(
    x, weights, entries, v, row_slots, num_rows, layer, first_module,
    num_layers, stride_x, in_features,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_slot = tl.load(row_slots + rows, mask=rows < num_rows, other=-1)
    x_rows = x + rows[:, None] * stride_x
    v_rows = v + (rows[:, None] * tl.num_programs(1) + index) * MAX_RANK
    slot = tl.max(row_slot, axis=0)
    while slot >= 0:
        entry = entries + ((slot * num_layers + layer) * MODULES + first_module + index) * 4
        rank = tl.load(entry + 2)
        a = weights + tl.multiple_of(tl.load(entry).to(tl.int64) * UNIT, UNIT)
        mine = (row_slot == slot)[:, None]
        for r0 in range(0, rank, BLOCK_RANK):
            rs = r0 + tl.arange(0, BLOCK_RANK)
            total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
            for k0 in range(0, in_features, BLOCK_IN):
                k = k0 + tl.arange(0, BLOCK_IN)
                x_tile = tl.load(x_rows + k[None, :], mask=mine & (k < in_features)[None, :], other=0.0)
                a_mask = (rs < rank)[None, :] & (k < in_features)[:, None]
                a_tile = tl.load(a + rs[None, :] * in_features + k[:, None], mask=a_mask, other=0.0)
                total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
            tl.store(v_rows + rs[None, :], total, mask=mine & (rs < rank)[None, :])
        slot = tl.max(tl.where(row_slot < slot, row_slot, -1), axis=0)


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["row_slots"])
def _expand(
    y, v, weights, entries, scales, row_slots, num_rows, layer, first_module,
    num_layers, stride_y, end0, end1, end2,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    index, begin, end, first = locate_columns(tl.program_id(1), end0, end1, end2, BLOCK_OUT)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_slot = tl.load(row_slots + rows, mask=rows < num_rows, other=-1)
    v_rows = v + (rows[:, None] * GROUP_SIZE + index) * MAX_RANK
    out_features = end - begin
    columns = first + tl.arange(0, BLOCK_OUT)
    column_mask = (columns < out_features)[None, :]
    y_tile = y + rows[:, None] * stride_y + begin + columns[None, :]
    slot = tl.max(row_slot, axis=0)
    while slot >= 0:
        position = ((slot * num_layers + layer) * MODULES + first_module + index) * 4
        rank = tl.load(entries + position + 2)
        b = weights + tl.multiple_of(tl.load(entries + position + 1).to(tl.int64) * UNIT, UNIT)
        mine = (row_slot == slot)[:, None]
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        for r0 in range(0, rank, BLOCK_RANK):
            rs = r0 + tl.arange(0, BLOCK_RANK)
            shrunk = tl.load(v_rows + rs[None, :], mask=mine & (rs < rank)[None, :], other=0.0)
            b_mask = (rs < rank)[:, None] & column_mask
            b_tile = tl.load(b + rs[:, None] * out_features + columns[None, :], mask=b_mask, other=0.0)
            high = shrunk.to(b_tile.dtype)
            total = tl.dot(high, b_tile, total, input_precision="ieee")
            if b_tile.dtype != tl.float32:
                low = (shrunk - high.to(tl.float32)).to(b_tile.dtype)
                total = tl.dot(low, b_tile, total, input_precision="ieee")
        if rank > 0:
            y_mask = mine & column_mask
            result = tl.load(y_tile, mask=y_mask, other=0.0).to(tl.float32) + tl.load(scales + position + 3) * total
            tl.store(y_tile, result.to(y.dtype.element_ty), mask=y_mask)
        slot = tl.max(tl.where(row_slot < slot, row_slot, -1), axis=0)
