# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Batched gather matrix-vector products (decode): row by row, on CUDA cores, for adapters of rank up to `SMALL_RANK`.

Semantics, shapes and dtypes: `kernels.reference`, under the same names, for those adapters; the others' rows are left
to `kernels.tall`. A program keeps a tile of its adapter's weights in registers, so that as many bytes as possible are
under way at once. K is split over programs whose partial sums the expand adds up: no atomics, and the split depends on
shapes alone. The expand starts while the shrink runs, and fetches its weights before it waits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks, locate_columns
from kernels.delta import (
    b_tile,
    constants,
    find_b,
    largest_rank,
    let_next_start,
    overlapped,
    read_chunk,
    wait_for_previous,
)
from kernels.table import SMALL_RANK, AdapterTable, Chunks, Group

BLOCK_IN = 256
BLOCK_OUT = 512
ELEMENTS_PER_WARP = 4096  # of a tile: in half precision, sixteen 16-byte loads a thread
REGISTERS = 168  # a thread may take; left to choose, the compiler saves some and asks for a few loads at a time


def num_splits(in_features: int) -> int:
    """Of K."""
    return -(-in_features // BLOCK_IN)


def shrunk(x: Tensor, group: Group) -> Tensor:
    """Room for what the shrink of `x` returns: `[splits, rows, modules, SMALL_RANK]` float32."""
    shape = (num_splits(x.shape[1]), x.shape[0], len(group.modules), SMALL_RANK)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def bgmv_shrink(
    x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.bgmv_shrink`."""
    num_rows, in_features = x.shape
    num_modules, splits = len(group.modules), num_splits(in_features)
    out = shrunk(x, group) if out is None else out
    _shrink[splits, num_modules, chunks.list.shape[0]](
        x, table.weights, table.entries, out, chunks.list, num_rows, layer, group.modules[0],
        table.num_layers, x.stride(0), in_features, **constants(table),
        GROUP_SIZE=num_modules, BLOCK_RANK=SMALL_RANK, BLOCK_IN=BLOCK_IN, OVERLAP=x.is_cuda,
        num_warps=SMALL_RANK * BLOCK_IN // ELEMENTS_PER_WARP, **({"maxnreg": REGISTERS} if x.is_cuda else {}),
    )  # fmt: skip
    return out


def bgmv_expand(
    y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, add: bool = True
) -> None:
    """See `kernels.reference.bgmv_expand`.

    Without `add`, y `[rows, columns[-1]]` float32 becomes what would have been added, and −0, which changes no bit of
    what it is added to, in base-model rows and unadapted modules.
    """
    splits, num_rows, num_modules, _ = v.shape
    blocks = column_blocks(group, BLOCK_OUT)
    _expand[blocks.num_blocks, chunks.list.shape[0]](
        y, v, table.weights, table.entries, chunks.list, num_rows, layer, group.modules[0],
        table.num_layers, y.stride(0), blocks.end0, blocks.end1, blocks.end2, **constants(table),
        GROUP_SIZE=num_modules, SPLITS=splits, BLOCK_RANK=SMALL_RANK, BLOCK_OUT=BLOCK_OUT, ADD=add,
        num_warps=SMALL_RANK * BLOCK_OUT // ELEMENTS_PER_WARP, **overlapped(y),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _shrink(
    x, weights, entries, v, chunks, num_rows, layer, first_module,
    num_layers, stride_x, in_features,
    UNIT: tl.constexpr, MODULES: tl.constexpr, GROUP_SIZE: tl.constexpr,
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
    k, rs = split * BLOCK_IN + tl.arange(0, BLOCK_IN), tl.arange(0, BLOCK_RANK)
    x_row = tl.load(x + row * stride_x + k, mask=k < in_features, other=0.0).to(tl.float32)
    v += ((split.to(tl.int64) * num_rows + row) * GROUP_SIZE + index) * BLOCK_RANK
    if largest_rank(entries, slot, True, layer, first_module, num_layers, GROUP_SIZE, MODULES) <= BLOCK_RANK:
        mask = (rs < rank)[:, None] & (k < in_features)[None, :]
        tile = tl.load(a + rs[:, None] * in_features + k[None, :], mask=mask, other=0.0)
        tl.store(v + rs, tl.sum(tile.to(tl.float32) * x_row[None, :], axis=1), mask=rs < rank)


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _expand(
    y, v, weights, entries, chunks, num_rows, layer, first_module,
    num_layers, stride_y, end0, end1, end2,
    UNIT: tl.constexpr, MODULES: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr,
    ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, row, count = read_chunk(chunks, tl.program_id(1))
    index, begin, end, first_column = locate_columns(tl.program_id(0), end0, end1, end2, BLOCK_OUT)
    out_features = end - begin
    columns = first_column + tl.arange(0, BLOCK_OUT)
    mask = columns < out_features
    b, rank, scale = find_b(weights, entries, slot, layer, first_module + index, num_layers, UNIT, MODULES)
    largest = largest_rank(
        entries, tl.maximum(slot, 0), slot >= 0, layer, first_module, num_layers, GROUP_SIZE, MODULES
    )
    is_small = largest <= BLOCK_RANK
    tile = b_tile(b, 0, tl.where(is_small, rank, 0), out_features, columns, mask, BLOCK_RANK)
    wait_for_previous(OVERLAP)
    y += row * stride_y + begin + columns
    if is_small & (rank > 0):
        before = tl.load(y, mask=mask & ADD, other=0.0).to(tl.float32)
        PADDED: tl.constexpr = triton.next_power_of_2(SPLITS)
        splits, rs = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK_RANK)[None, :]
        partial = v + ((splits * num_rows + row) * GROUP_SIZE + index) * BLOCK_RANK + rs
        shrunk = tl.sum(tl.load(partial, mask=(splits < SPLITS) & (rs < rank), other=0.0), axis=0)
        total = before + scale * tl.sum(shrunk[:, None] * tile.to(tl.float32), axis=0)
        tl.store(y, total.to(y.dtype.element_ty), mask=mask)
    elif is_small & (count > 0) & (not ADD):
        tl.store(y, tl.zeros((BLOCK_OUT,), tl.float32) * -1.0, mask=mask)  # tl.full takes −0 for 0
