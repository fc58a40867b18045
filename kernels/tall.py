# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Products of tiles of rows (decode), on tensor cores, for adapters of rank above `SMALL_RANK`.

Semantics, shapes and dtypes: `kernels.reference`, under the names that end alike, for those adapters; the others' rows
are left to `kernels.bgmv`. A tile is up to `TILE_ROWS` neighbouring rows of one adapter, whose weights are read once
for all of them; it always has the same shape, so that a row's result depends on no other row. The programs share out
what the work list turns out to hold, split by K or by columns, and end at once where it holds nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.columns import column_blocks
from kernels.delta import constants, find_b, largest_rank, let_next_start, overlapped, wait_for_previous
from kernels.sgmv import expand_columns, expand_columns_deep, shrink_tile
from kernels.table import SMALL_RANK, TILE_ROWS, AdapterTable, Chunks, Group

MIN_CHUNKS = 64  # one variant of the kernels for all shorter lists
SHRINK_PROGRAMS, EXPAND_PROGRAMS = 528, 264  # four and two for each multiprocessor of an H200
BYTES_IN = 256  # of a row of A or of x at once
BLOCK_RANK = 64  # of A at once
BLOCK_OUT = 128
STAGES = 3


def num_splits(group: Group) -> int:
    """Of K. A group of one module has fewer other ways to share out its work."""
    return max(1, min(16 if len(group.modules) == 1 else 8, group.in_features // 128))


def shrunk(x: Tensor, table: AdapterTable, group: Group) -> Tensor:
    """Room for what the shrink of `x` returns: `[splits, rows, modules, table.max_rank]` float32."""
    shape = (num_splits(group), x.shape[0], len(group.modules), table.max_rank)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def tall_shrink(
    x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.bgmv_shrink`."""
    (num_rows, in_features), num_modules, splits = x.shape, len(group.modules), num_splits(group)
    block_in = BYTES_IN // x.element_size()
    out = shrunk(x, table, group) if out is None else out
    _shrink[min(SHRINK_PROGRAMS, chunks.list.shape[0] * splits * num_modules),](
        x, table.weights, table.entries, out, chunks.list, chunks.list.shape[0], num_rows, layer, group.modules[0],
        table.num_layers, x.stride(0), in_features, triton.cdiv(triton.cdiv(in_features, splits), block_in) * block_in,
        **constants(table), MAX_RANK=table.max_rank, SMALL=SMALL_RANK, CHUNKS=_room(chunks), GROUP_SIZE=num_modules,
        SPLITS=splits, BLOCK_ROWS=TILE_ROWS, BLOCK_RANK=BLOCK_RANK, BLOCK_IN=block_in, OVERLAP=x.is_cuda,
        num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return out


def tall_expand(
    y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, add: bool = True
) -> None:
    """See `kernels.reference.bgmv_expand`, and `kernels.bgmv.bgmv_expand` for `add`."""
    splits, num_rows, num_modules, _ = v.shape
    blocks = column_blocks(group, BLOCK_OUT)
    _expand[min(EXPAND_PROGRAMS, chunks.list.shape[0] * blocks.num_blocks),](
        y, v, table.weights, table.entries, chunks.list, chunks.list.shape[0], num_rows, layer, group.modules[0],
        table.num_layers, y.stride(0), blocks.end0, blocks.end1, blocks.end2, blocks.num_blocks,
        **constants(table), MAX_RANK=table.max_rank, SMALL=SMALL_RANK, CHUNKS=_room(chunks), GROUP_SIZE=num_modules,
        SPLITS=splits, BLOCK_ROWS=TILE_ROWS, BLOCK_OUT=BLOCK_OUT, STAGES=STAGES, ADD=add, num_warps=4,
        **overlapped(y),
    )  # fmt: skip


def _room(chunks: Chunks) -> int:
    return max(MIN_CHUNKS, int(triton.next_power_of_2(chunks.list.shape[0])))


@triton.jit
def _tall_tiles(
    chunks, num_chunks, entries, layer, first_module, num_layers,
    GROUP_SIZE: tl.constexpr, MODULES: tl.constexpr, SMALL: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of every chunk: its number; where a tile of a tall adapter starts there, which of those it is, from 1 (else 0);
    and the adapter's rank there."""
    numbers = tl.arange(0, CHUNKS)
    listed = numbers < num_chunks
    slots = tl.load(chunks + numbers * 4, mask=listed, other=-1)
    starts = tl.load(chunks + numbers * 4 + 3, mask=listed, other=0) > 0
    ranks = largest_rank(
        entries, tl.maximum(slots, 0), slots >= 0, layer, first_module, num_layers, GROUP_SIZE, MODULES
    )
    is_tall = (starts & (ranks > SMALL)).to(tl.int32)
    return numbers, tl.cumsum(is_tall, 0) * is_tall, ranks * is_tall


@triton.jit
def _read_tile(chunks, number, BLOCK_ROWS: tl.constexpr):
    """Slot, rows (int64) and which of them exist, of the tile that starts at chunk `number`."""
    chunk = chunks + number * 4
    places = tl.arange(0, BLOCK_ROWS)
    return tl.load(chunk), tl.load(chunk + 1).to(tl.int64) + places, places < tl.load(chunk + 3)


@triton.jit(
    do_not_specialize=["num_chunks", "num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"]
)
def _shrink(
    x, weights, entries, v, chunks, num_chunks, num_rows, layer, first_module,
    num_layers, stride_x, in_features, split_size,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr, SMALL: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    numbers, _, ranks = _tall_tiles(
        chunks, num_chunks, entries, layer, first_module, num_layers, GROUP_SIZE, MODULES, SMALL, CHUNKS
    )
    # A unit of work is a block of ranks of a tile, in one module and one part of K: all take as many bytes of A.
    blocks = tl.cdiv(ranks, BLOCK_RANK)
    ends = tl.cumsum(blocks, 0)
    for work in range(tl.program_id(0), tl.max(ends, 0) * (SPLITS * GROUP_SIZE), tl.num_programs(0)):
        block, index, split = work // (SPLITS * GROUP_SIZE), work % GROUP_SIZE, work // GROUP_SIZE % SPLITS
        is_here = (block < ends) & (block >= ends - blocks)
        slot, rows, row_mask = _read_tile(chunks, tl.sum(tl.where(is_here, numbers, 0)), BLOCK_ROWS)
        r0 = (block - tl.sum(tl.where(is_here, ends - blocks, 0))) * BLOCK_RANK
        entry = entries + ((slot * num_layers + layer) * MODULES + first_module + index) * 4
        rank = tl.load(entry + 2)
        a = weights + tl.multiple_of(tl.load(entry).to(tl.int64) * UNIT, UNIT)
        begin = split * split_size
        end = tl.minimum(begin + split_size, in_features)
        v_rows = v + ((split * num_rows + rows[:, None]) * GROUP_SIZE + index) * MAX_RANK
        if r0 < rank:
            shrink_tile(
                x + rows[:, None] * stride_x, a, v_rows, row_mask, r0, rank, begin, end, in_features,
                BLOCK_ROWS, BLOCK_RANK, BLOCK_IN,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_chunks", "num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"]
)
def _expand(
    y, v, weights, entries, chunks, num_chunks, num_rows, layer, first_module,
    num_layers, stride_y, end0, end1, end2, num_blocks,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr, SMALL: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    STAGES: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    numbers, order, ranks = _tall_tiles(
        chunks, num_chunks, entries, layer, first_module, num_layers, GROUP_SIZE, MODULES, SMALL, CHUNKS
    )
    # Each program takes an equal share of all bytes of B, as near as whole blocks of columns allow.
    costs = tl.cdiv(ranks, 32) + (ranks > 0).to(tl.int32)  # of a block; y costs as much as a few ranks
    before = tl.cumsum(costs, 0) - costs
    total = tl.sum(costs) * num_blocks
    begin_share = (tl.program_id(0).to(tl.int64) * total // tl.num_programs(0)).to(tl.int32)
    end_share = ((tl.program_id(0) + 1).to(tl.int64) * total // tl.num_programs(0)).to(tl.int32)
    is_tall = order > 0
    first_tile = tl.sum((is_tall & ((before + costs) * num_blocks <= begin_share)).to(tl.int32))
    end_tile = tl.sum((is_tall & (before * num_blocks < end_share)).to(tl.int32))
    wait_for_previous(OVERLAP)
    for tile in range(first_tile, end_tile):
        slot, rows, row_mask = _read_tile(chunks, tl.sum(tl.where(order == tile + 1, numbers, 0)), BLOCK_ROWS)
        cost = tl.sum(tl.where(order == tile + 1, costs, 0))
        passed = tl.sum(tl.where(order == tile + 1, before, 0)) * num_blocks
        first_block = tl.cdiv(tl.maximum(begin_share - passed, 0), cost)
        end_block = tl.minimum(tl.cdiv(end_share - passed, cost), num_blocks)
        module_block = 0
        for index in range(GROUP_SIZE):
            begin = tl.where(index == 0, 0, tl.where(index == 1, end0, end1))
            out_features = tl.where(index == 0, end0, tl.where(index == 1, end1, end2)) - begin
            column = tl.maximum(first_block - module_block, 0) * BLOCK_OUT
            last = tl.minimum((end_block - module_block) * BLOCK_OUT, out_features)
            module_block += tl.cdiv(out_features, BLOCK_OUT)
            if column < last:
                b, rank, scale = find_b(weights, entries, slot, layer, first_module + index, num_layers, UNIT, MODULES)
                _expand_tile(
                    y + rows[:, None] * stride_y + begin, v, b, scale, rows, row_mask, index, rank, num_rows,
                    out_features, column, last, GROUP_SIZE, SPLITS, MAX_RANK, BLOCK_ROWS, BLOCK_OUT, STAGES, ADD,
                )  # fmt: skip


@triton.jit
def _expand_tile(
    y, v, b, scale, rows, row_mask, index, rank, num_rows, out_features, begin, end,
    GROUP_SIZE: tl.constexpr, SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Columns `begin` up to `end` of one module, with blocks as deep as the rank needs."""
    if rank == 0:
        if not ADD:
            for c0 in range(begin, end, BLOCK_OUT):
                columns = c0 + tl.arange(0, BLOCK_OUT)
                mask = row_mask[:, None] & (columns < end)[None, :]
                nothing = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32) * -1.0  # tl.full takes −0 for 0
                tl.store(y + columns[None, :], nothing, mask=mask)
    elif rank <= 32:
        expand_columns(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, SPLITS, out_features, begin, end,
            GROUP_SIZE, SPLITS, MAX_RANK, 32, BLOCK_OUT, STAGES, ADD,
        )  # fmt: skip
    elif rank <= 64:
        expand_columns(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, SPLITS, out_features, begin, end,
            GROUP_SIZE, SPLITS, MAX_RANK, 64, BLOCK_OUT, STAGES, ADD,
        )  # fmt: skip
    elif rank <= 128:
        expand_columns(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, SPLITS, out_features, begin, end,
            GROUP_SIZE, SPLITS, MAX_RANK, 128, BLOCK_OUT // 2, STAGES, ADD,
        )  # fmt: skip
    else:
        expand_columns_deep(
            y, v, b, scale, rows, row_mask, index, rank, num_rows, SPLITS, out_features, begin, end,
            GROUP_SIZE, SPLITS, MAX_RANK, BLOCK_OUT, ADD,
        )  # fmt: skip
