# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Batched gather matrix-vector products: chunks of one row (decode), on CUDA cores.

Semantics, shapes and dtypes: `kernels.reference`, under the same names. A program keeps a tile of its adapter's weights
in registers, so that as many bytes as possible are under way at once. K is split over programs whose partial sums the
expand adds up: no atomics, and the split depends on shapes alone. The expand starts while the shrink runs, and fetches
its weights before it waits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks, locate_columns
from kernels.delta import add_row, b_tile, constants, find_b, let_next_start, overlapped, read_chunk, wait_for_previous
from kernels.table import AdapterTable, Chunks, Group

SHRINK_RANK = 16
EXPAND_RANK = 16
BLOCK_IN = 256
BLOCK_OUT = 512
ELEMENTS_PER_WARP = 4096  # of a tile: in half precision, sixteen 16-byte loads a thread


def num_splits(in_features: int) -> int:
    """Of K."""
    return -(-in_features // BLOCK_IN)


def bgmv_shrink(
    x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.bgmv_shrink`."""
    num_rows, in_features = x.shape
    num_modules, splits = len(group.modules), num_splits(in_features)
    if out is None:
        out = torch.empty((splits, num_rows, num_modules, table.max_rank), dtype=torch.float32, device=x.device)
    _shrink[splits, num_modules, chunks.list.shape[0]](
        x, table.weights, table.entries, out, chunks.list, num_rows, layer, group.modules[0],
        table.num_layers, x.stride(0), in_features, **constants(table),
        BLOCK_RANK=SHRINK_RANK, BLOCK_IN=BLOCK_IN, OVERLAP=x.is_cuda,
        num_warps=SHRINK_RANK * BLOCK_IN // ELEMENTS_PER_WARP,
    )  # fmt: skip
    return out


def bgmv_expand(y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks) -> None:
    """See `kernels.reference.bgmv_expand`."""
    splits, num_rows, num_modules, _ = v.shape
    blocks = column_blocks(group, BLOCK_OUT)
    _expand[blocks.num_blocks, chunks.list.shape[0]](
        y, v, table.weights, table.entries, chunks.list, num_rows, layer, group.modules[0],
        table.num_layers, y.stride(0), blocks.end0, blocks.end1, blocks.end2, **constants(table),
        GROUP_SIZE=num_modules, SPLITS=splits, BLOCK_RANK=EXPAND_RANK, BLOCK_OUT=BLOCK_OUT,
        num_warps=EXPAND_RANK * BLOCK_OUT // ELEMENTS_PER_WARP, **overlapped(y),
    )  # fmt: skip


@triton.jit
def _a_tile(a, r0, rank, k, in_features, BLOCK_RANK: tl.constexpr):
    rs = r0 + tl.arange(0, BLOCK_RANK)
    mask = (rs < rank)[:, None] & (k < in_features)[None, :]
    return tl.load(a + rs[:, None] * in_features + k[None, :], mask=mask, other=0.0)


@triton.jit
def _store_v(v, tile, x, r0, rank, BLOCK_RANK: tl.constexpr):
    rs = r0 + tl.arange(0, BLOCK_RANK)
    tl.store(v + rs, tl.sum(tile.to(tl.float32) * x[None, :], axis=1), mask=rs < rank)


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _shrink(
    x, weights, entries, v, chunks, num_rows, layer, first_module,
    num_layers, stride_x, in_features,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split, index = tl.program_id(0), tl.program_id(1)
    let_next_start(OVERLAP)
    slot, row, _ = read_chunk(chunks, tl.program_id(2))
    if slot < 0:
        return
    entry = entries + ((slot * num_layers + layer) * MODULES + first_module + index) * 4
    rank = tl.load(entry + 2)
    a = weights + tl.multiple_of(tl.load(entry).to(tl.int64) * UNIT, UNIT)
    k = split * BLOCK_IN + tl.arange(0, BLOCK_IN)
    x_row = tl.load(x + row * stride_x + k, mask=k < in_features, other=0.0).to(tl.float32)
    v += ((split.to(tl.int64) * num_rows + row) * tl.num_programs(1) + index) * MAX_RANK
    if rank <= BLOCK_RANK:
        _store_v(v, _a_tile(a, 0, rank, k, in_features, BLOCK_RANK), x_row, 0, rank, BLOCK_RANK)
    else:
        # The next tile is under way while this one is summed.
        HALF: tl.constexpr = BLOCK_RANK // 2
        tile = _a_tile(a, 0, rank, k, in_features, HALF)
        for r0 in range(0, rank, HALF):
            next_tile = _a_tile(a, r0 + HALF, rank, k, in_features, HALF)
            _store_v(v, tile, x_row, r0, rank, HALF)
            tile = next_tile


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _expand(
    y, v, weights, entries, chunks, num_rows, layer, first_module,
    num_layers, stride_y, end0, end1, end2,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, row, _ = read_chunk(chunks, tl.program_id(1))
    index, begin, end, first_column = locate_columns(tl.program_id(0), end0, end1, end2, BLOCK_OUT)
    out_features = end - begin
    columns = first_column + tl.arange(0, BLOCK_OUT)
    mask = columns < out_features
    b, rank, scale = find_b(weights, entries, slot, layer, first_module + index, num_layers, UNIT, MODULES)
    tile = b_tile(b, 0, rank, out_features, columns, mask, BLOCK_RANK)
    wait_for_previous(OVERLAP)
    if rank == 0:
        return
    y += row * stride_y + begin + columns
    total = add_row(
        tl.load(y, mask=mask, other=0.0), tile, b, scale, v, row, index, rank, num_rows, out_features,
        columns, mask, GROUP_SIZE, SPLITS, MAX_RANK, BLOCK_RANK,
    )  # fmt: skip
    tl.store(y, total, mask=mask)
