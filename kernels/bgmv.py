# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Batched gather matrix-vector products: one row a token, each with its own adapter (decode).

Semantics, shapes and dtypes: `kernels.reference`, under the same names. Every program reads its row's slot, finds the
module's weights, true rank and scale in the table's entries and loops over the rank, so that one launch serves all
ranks and no grid depends on the adapters. K is split over programs whose partial sums the expand adds up: no atomics,
and the split depends on the model's shape alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks, locate_columns
from kernels.table import MAX_RANK, NUM_MODULES, OFFSET_UNIT, AdapterTable, Group

BLOCK_RANK = 16
BLOCK_IN = 256
BLOCK_OUT = 256
MAX_SPLITS = 8
MIN_SPLIT = 512


def bgmv_shrink(x: Tensor, table: AdapterTable, layer: int, group: Group, row_slots: Tensor) -> Tensor:
    """See `kernels.reference.bgmv_shrink`."""
    num_rows, in_features = x.shape
    splits = min(MAX_SPLITS, triton.cdiv(in_features, MIN_SPLIT))
    split_size = triton.cdiv(triton.cdiv(in_features, splits), BLOCK_IN) * BLOCK_IN
    v = torch.empty((splits, num_rows, len(group.modules), MAX_RANK), dtype=torch.float32, device=x.device)
    _shrink[num_rows, len(group.modules), splits](
        x, table.weights, table.entries, v, row_slots, num_rows, layer, group.modules[0],
        table.num_layers, x.stride(0), in_features, split_size, **_constants(table),
        BLOCK_RANK=BLOCK_RANK, BLOCK_IN=BLOCK_IN,
    )  # fmt: skip
    return v


def bgmv_expand(y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, row_slots: Tensor) -> None:
    """See `kernels.reference.bgmv_expand`."""
    splits, num_rows, num_modules, _ = v.shape
    blocks = column_blocks(group, BLOCK_OUT)
    _expand[num_rows, blocks.num_blocks](
        y, v, table.weights, table.entries, table.scales, row_slots, num_rows, layer, group.modules[0],
        table.num_layers, y.stride(0), blocks.end0, blocks.end1, blocks.end2, **_constants(table),
        GROUP_SIZE=num_modules, SPLITS=splits, BLOCK_RANK=BLOCK_RANK, BLOCK_OUT=BLOCK_OUT,
    )  # fmt: skip


def _constants(table: AdapterTable) -> dict[str, int]:
    return {"UNIT": OFFSET_UNIT // table.weights.element_size(), "MODULES": NUM_MODULES, "MAX_RANK": MAX_RANK}


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["row_slots"])
def _shrink(
    x, weights, entries, v, row_slots, num_rows, layer, first_module,
    num_layers, stride_x, in_features, split_size,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    row, index, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(row_slots + row)
    if slot < 0:
        return
    entry = entries + ((slot * num_layers + layer) * MODULES + first_module + index) * 4
    rank = tl.load(entry + 2)
    a = weights + tl.multiple_of(tl.load(entry).to(tl.int64) * UNIT, UNIT)
    v += ((split * num_rows + row) * tl.num_programs(1) + index) * MAX_RANK
    x += row * stride_x
    ks = tl.arange(0, BLOCK_IN)
    begin = split * split_size
    end = tl.minimum(begin + split_size, in_features)
    for r0 in range(0, rank, BLOCK_RANK):
        rs = r0 + tl.arange(0, BLOCK_RANK)
        partial = tl.zeros((BLOCK_RANK, BLOCK_IN), tl.float32)
        for k0 in range(begin, end, BLOCK_IN):
            k = k0 + ks
            x_tile = tl.load(x + k, mask=k < end, other=0.0)
            a_mask = (rs < rank)[:, None] & (k < end)[None, :]
            a_tile = tl.load(a + rs[:, None] * in_features + k[None, :], mask=a_mask, other=0.0)
            partial += a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :]
        tl.store(v + rs, tl.sum(partial, axis=1), mask=rs < rank)


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["row_slots"])
def _expand(
    y, v, weights, entries, scales, row_slots, num_rows, layer, first_module,
    num_layers, stride_y, end0, end1, end2,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index, begin, end, first = locate_columns(tl.program_id(1), end0, end1, end2, BLOCK_OUT)
    slot = tl.load(row_slots + row)
    if slot < 0:
        return
    position = ((slot * num_layers + layer) * MODULES + first_module + index) * 4
    rank = tl.load(entries + position + 2)
    if rank == 0:
        return
    out_features = end - begin
    b = weights + tl.multiple_of(tl.load(entries + position + 1).to(tl.int64) * UNIT, UNIT)
    columns = first + tl.arange(0, BLOCK_OUT)
    column_mask = columns < out_features
    total = tl.zeros((BLOCK_OUT,), tl.float32)
    for r0 in range(0, rank, BLOCK_RANK):
        rs = r0 + tl.arange(0, BLOCK_RANK)
        shrunk = tl.zeros((BLOCK_RANK,), tl.float32)
        for split in tl.static_range(SPLITS):
            v_row = v + ((split * num_rows + row) * GROUP_SIZE + index) * MAX_RANK
            shrunk += tl.load(v_row + rs, mask=rs < rank, other=0.0)
        b_mask = (rs < rank)[:, None] & column_mask[None, :]
        b_tile = tl.load(b + rs[:, None] * out_features + columns[None, :], mask=b_mask, other=0.0)
        total += tl.sum(shrunk[:, None] * b_tile.to(tl.float32), axis=0)
    y += row * stride_y + begin + columns
    result = tl.load(y, mask=column_mask, other=0.0).to(tl.float32) + tl.load(scales + position + 3) * total
    tl.store(y, result.to(y.dtype.element_ty), mask=column_mask)
