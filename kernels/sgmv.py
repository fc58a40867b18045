# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Segmented gather matrix products: chunks of many rows with one adapter (prefill, large batches), on tensor cores.

Semantics, shapes and dtypes: `kernels.reference`, under the same names. A program owns a chunk, so that an adapter's
weights are read once for all of its rows. K is split over programs where there are few chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks, locate_columns
from kernels.delta import (
    b_tile,
    constants,
    dot_wide,
    find_b,
    let_next_start,
    overlapped,
    read_chunk,
    v_tile,
    wait_for_previous,
)
from kernels.table import AdapterTable, Chunks, Group

BYTES_IN = 256  # of a row of A or of x at once
EXPAND_BLOCKS = {16: (128, 4), 64: (128, 8)}  # rows of a chunk: (columns of a block, blocks of a program)
EXPAND_STAGES = 3
PROGRAMS = 264  # two for each multiprocessor of an H200
# By rows of a chunk. The expand holds all partial sums at once; with eight, 64 rows fill a multiprocessor.
MAX_SPLITS = {16: 8, 64: 4}
MIN_SPLIT = 512


def num_splits(num_rows: int, in_features: int, num_modules: int, rows_per_chunk: int) -> int:
    """Of K: as many as keep the GPU busy with full chunks; the result depends on shapes alone."""
    wanted = -(-PROGRAMS // (-(-num_rows // rows_per_chunk) * num_modules or 1))
    return max(1, min(wanted, MAX_SPLITS[rows_per_chunk], in_features // MIN_SPLIT))


def shrunk(x: Tensor, table: AdapterTable, group: Group, chunks: Chunks) -> Tensor:
    """Room for what the shrink of `x` returns: `[splits, rows, modules, table.max_rank]` float32."""
    (num_rows, in_features), num_modules = x.shape, len(group.modules)
    splits = num_splits(num_rows, in_features, num_modules, chunks.rows_per_chunk)
    return torch.empty((splits, num_rows, num_modules, table.max_rank), dtype=torch.float32, device=x.device)


def sgmv_shrink(
    x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.sgmv_shrink`."""
    num_rows, in_features = x.shape
    num_modules, block_rows = len(group.modules), chunks.rows_per_chunk
    splits = num_splits(num_rows, in_features, num_modules, block_rows)
    block_in = BYTES_IN // x.element_size()
    split_size = triton.cdiv(triton.cdiv(in_features, splits), block_in) * block_in
    out = shrunk(x, table, group, chunks) if out is None else out
    _shrink[splits, num_modules, chunks.list.shape[0]](
        x, table.weights, table.entries, out, chunks.list, num_rows, layer, group.modules[0],
        table.num_layers, x.stride(0), in_features, split_size, **constants(table), MAX_RANK=table.max_rank,
        BLOCK_ROWS=block_rows, BLOCK_IN=block_in, OVERLAP=x.is_cuda, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def sgmv_expand(
    y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, after_shrink: bool = True
) -> None:
    """See `kernels.reference.sgmv_expand`. `after_shrink`: the shrink is what was launched last on this stream."""
    splits, num_rows, num_modules, _ = v.shape
    block_rows = chunks.rows_per_chunk
    block_out, blocks_per_program = EXPAND_BLOCKS[block_rows]
    blocks = column_blocks(group, block_out * blocks_per_program)
    _expand[blocks.num_blocks, chunks.list.shape[0]](
        y, v, table.weights, table.entries, chunks.list, num_rows, layer, group.modules[0],
        table.num_layers, y.stride(0), blocks.end0, blocks.end1, blocks.end2, splits, **constants(table),
        MAX_RANK=table.max_rank, GROUP_SIZE=num_modules, MAX_SPLITS=MAX_SPLITS[block_rows], BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out, BLOCKS=blocks_per_program, STAGES=EXPAND_STAGES, num_warps=4,
        **(overlapped(y) if after_shrink else {"OVERLAP": False}),
    )  # fmt: skip


@triton.jit
def shrink_tile(
    x, a, v, row_mask, r0, rank, begin, end, in_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    rs = r0 + tl.arange(0, BLOCK_RANK)
    total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
    for k0 in range(begin, end, BLOCK_IN):
        k = k0 + tl.arange(0, BLOCK_IN)
        x_tile = tl.load(x + k[None, :], mask=row_mask[:, None] & (k < end)[None, :], other=0.0)
        a_mask = (rs < rank)[None, :] & (k < end)[:, None]
        a_tile = tl.load(a + rs[None, :] * in_features + k[:, None], mask=a_mask, other=0.0)
        total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
    tl.store(v + rs[None, :], total, mask=row_mask[:, None] & (rs < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _shrink(
    x, weights, entries, v, chunks, num_rows, layer, first_module,
    num_layers, stride_x, in_features, split_size,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split, index = tl.program_id(0), tl.program_id(1)
    let_next_start(OVERLAP)
    slot, first, count = read_chunk(chunks, tl.program_id(2))
    if slot < 0:
        return
    entry = entries + ((slot * num_layers + layer) * MODULES + first_module + index) * 4
    rank = tl.load(entry + 2)
    a = weights + tl.multiple_of(tl.load(entry).to(tl.int64) * UNIT, UNIT)
    row_mask = tl.arange(0, BLOCK_ROWS) < count
    rows = (first + tl.arange(0, BLOCK_ROWS))[:, None]
    begin = split * split_size
    end = tl.minimum(begin + split_size, in_features)
    x += rows * stride_x
    v += ((split.to(tl.int64) * num_rows + rows) * tl.num_programs(1) + index) * MAX_RANK
    if rank <= 16:
        shrink_tile(x, a, v, row_mask, 0, rank, begin, end, in_features, BLOCK_ROWS, 16, BLOCK_IN)
    else:
        for r0 in range(0, rank, 64):
            shrink_tile(x, a, v, row_mask, r0, rank, begin, end, in_features, BLOCK_ROWS, 64, BLOCK_IN)


@triton.jit(
    do_not_specialize=["num_rows", "layer", "first_module", "splits"], do_not_specialize_on_alignment=["chunks"]
)
def _expand(
    y, v, weights, entries, chunks, num_rows, layer, first_module,
    num_layers, stride_y, end0, end1, end2, splits,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr, GROUP_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, first, count = read_chunk(chunks, tl.program_id(1))
    index, begin, end, column = locate_columns(tl.program_id(0), end0, end1, end2, BLOCK_OUT * BLOCKS)
    b, rank, scale = find_b(weights, entries, slot, layer, first_module + index, num_layers, UNIT, MODULES)
    wait_for_previous(OVERLAP)
    if rank == 0:
        return
    last = tl.minimum(column + BLOCK_OUT * BLOCKS, end - begin)
    rows, row_mask = first + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_ROWS) < count
    y += rows[:, None] * stride_y + begin
    if rank <= 16:
        expand_columns(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, splits, end - begin, column, last,
            GROUP_SIZE, MAX_SPLITS, MAX_RANK, 16, BLOCK_OUT, STAGES, True,
        )  # fmt: skip
    elif rank <= 64:
        expand_columns(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, splits, end - begin, column, last,
            GROUP_SIZE, MAX_SPLITS, MAX_RANK, 64, BLOCK_OUT, STAGES, True,
        )  # fmt: skip
    else:
        expand_columns_deep(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, splits, end - begin, column, last,
            GROUP_SIZE, MAX_SPLITS, MAX_RANK, BLOCK_OUT, True,
        )  # fmt: skip


@triton.jit
def expand_columns(
    y, v, b, scale, rows, row_mask, index, rank, num_rows, splits, out_features, begin, end,
    GROUP_SIZE: tl.constexpr, MAX_SPLITS: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Blocks of columns in turn, the next ones on their way; ranks up to BLOCK_RANK. Not `ADD`: store the product."""
    dtype: tl.constexpr = b.dtype.element_ty
    high, low = v_tile(
        v, rows, row_mask, index, 0, rank, num_rows, splits, scale, dtype, GROUP_SIZE, MAX_SPLITS, MAX_RANK, BLOCK_RANK
    )
    for c0 in tl.range(begin, end, BLOCK_OUT, num_stages=STAGES):
        columns = c0 + tl.arange(0, BLOCK_OUT)
        mask = row_mask[:, None] & (columns < end)[None, :]
        before = tl.load(y + columns[None, :], mask=mask & ADD, other=0.0)
        tile = b_tile(b, 0, rank, out_features, columns, columns < end, BLOCK_RANK)
        total = dot_wide(high, low, tile, before.to(tl.float32))
        tl.store(y + columns[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def expand_columns_deep(
    y, v, b, scale, rows, row_mask, index, rank, num_rows, splits, out_features, begin, end,
    GROUP_SIZE: tl.constexpr, MAX_SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """As `expand_columns`, for any rank."""
    dtype: tl.constexpr = b.dtype.element_ty
    for c0 in range(begin, end, BLOCK_OUT):
        columns = c0 + tl.arange(0, BLOCK_OUT)
        mask = row_mask[:, None] & (columns < end)[None, :]
        total = tl.load(y + columns[None, :], mask=mask & ADD, other=0.0).to(tl.float32)
        for r0 in range(0, rank, 32):
            high, low = v_tile(
                v, rows, row_mask, index, r0, rank, num_rows, splits, scale, dtype, GROUP_SIZE, MAX_SPLITS, MAX_RANK, 32
            )
            total = dot_wide(high, low, b_tile(b, r0, rank, out_features, columns, columns < end, 32), total)
        tl.store(y + columns[None, :], total.to(y.dtype.element_ty), mask=mask)
