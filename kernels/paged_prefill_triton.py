# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Prefill attention on a GPU (flash attention). Semantics: `kernels.paged_attention.paged_prefill`.

A program takes a run of one chunk's tokens, with all query heads of one KV head, as the rows of its tile. With t tokens
a tile and rows counted from the first chunk's first, chunk c owns the programs from query_starts[c] // t + c on: enough
for its tiles, and a search finds c from the program. The last chunk's tiles start first. Programs beyond the tiles end
at once: a launch may have room for more chunks and tokens than there are. Keys that every row sees take no mask.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Rows (tokens times query heads) and keys of a tile, and how a program runs."""

    rows: int
    keys: int
    warps: int
    stages: int


FEW_ROWS = 128 * 132  # below, smaller tiles keep more multiprocessors busy


def tile_of(dtype: torch.dtype, head_dim: int, num_rows: int) -> Tile:
    """From what is fixed for a batch bucket; `num_rows` is tokens times query heads."""
    if dtype == torch.float32:
        return Tile(16, 16, 4, 2)
    if head_dim > 128:
        return Tile(64, 32, 8, 2)
    return Tile(64, 64, 4, 3) if num_rows < FEW_ROWS else Tile(128, 64, 8, 3)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """See `kernels.paged_attention.paged_prefill`. `tile` overrides `tile_of`."""
    (tokens, heads, head_dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    group, chunks = heads // kv_heads, query_starts.shape[0] - 1
    tile = tile or tile_of(q.dtype, head_dim, tokens * heads)
    rows = max(tile.rows, triton.next_power_of_2(group))
    tile_tokens = rows // group
    _prefill[kv_heads, tokens // tile_tokens + chunks](
        q, k_cache, v_cache, block_tables, query_starts, seq_lens, out, scale * math.log2(math.e), window, chunks,
        q.stride(0), block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HAS_WINDOW=window > 0, TILE_TOKENS=tile_tokens,
        BLOCK_ROWS=rows, BLOCK_KEYS=tile.keys, BLOCK_DIM=max(triton.next_power_of_2(head_dim), 16),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _find_chunk(query_starts, first_row, program, chunks, TILE_TOKENS: tl.constexpr):
    """The last chunk c with (query_starts[c] - first_row) // TILE_TOKENS + c <= program."""
    low, high = program * 0, chunks
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_starts + middle) - first_row) // TILE_TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    result, top, total, q_tile, k_cache, v_cache, table, begin, end, length, positions, scale, window,
    kv_heads, kv_head, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys from `begin` (inclusive) to `end`; without MASKED every row sees them all."""
    dims = tl.arange(0, BLOCK_DIM)
    for first in range(begin, end, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        mask = (keys < length)[:, None] & (dims < HEAD_DIM)[None, :]
        block = tl.load(table + keys // BLOCK_SIZE, mask=keys < length, other=0).to(tl.int64)
        slots = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * kv_heads + kv_head
        offsets = slots[:, None] * HEAD_DIM + dims[None, :]
        k_tile = tl.load(k_cache + offsets, mask=mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = higher
        if MASKED:  # a row that has seen no key yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        v_tile = tl.load(v_cache + offsets, mask=mask, other=0.0)
        result = tl.dot(weights.to(v_tile.dtype), v_tile, result * shrink[:, None], input_precision="ieee")
        top = higher
    return result, top, total


@triton.jit(
    do_not_specialize=["window", "chunks", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"],
)
def _prefill(
    q, k_cache, v_cache, block_tables, query_starts, seq_lens, out, scale, window, chunks, stride_q, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    kv_head, kv_heads = tl.program_id(0), tl.num_programs(0)
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    num_before = tl.load(query_starts)
    chunk = _find_chunk(query_starts, num_before, program, chunks, TILE_TOKENS)
    row_begin = tl.load(query_starts + chunk)
    num_queries = tl.load(query_starts + chunk + 1) - row_begin
    first_token = (program - (row_begin - num_before) // TILE_TOKENS - chunk) * TILE_TOKENS
    if first_token >= num_queries:
        return
    seq = num_before + chunk
    length = tl.load(seq_lens + seq)
    first_position = length - num_queries + first_token
    last_position = tl.minimum(first_position + TILE_TOKENS, length) - 1

    rows, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = ((rows // GROUP < TILE_TOKENS) & (tokens < num_queries))[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = (row_begin + tokens).to(tl.int64)[:, None]
    q_offsets = token_rows * stride_q + heads[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q + q_offsets, mask=row_mask, other=0.0)
    positions = tl.minimum(first_position + rows // GROUP, last_position)
    table = block_tables + seq.to(tl.int64) * stride_table
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    result = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)

    end = last_position + 1
    begin, seen_begin = 0, 0  # keys from seen_begin to seen_end are seen by every row
    seen_end = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        seen_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_KEYS) * BLOCK_KEYS
        seen_end = tl.maximum(seen_begin, seen_end)
        result, top, total = _attend(
            result, top, total, q_tile, k_cache, v_cache, table, begin, tl.minimum(seen_begin, end), length,
            positions, scale, window, kv_heads, kv_head, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, BLOCK_KEYS, BLOCK_DIM, True,
        )  # fmt: skip
    result, top, total = _attend(
        result, top, total, q_tile, k_cache, v_cache, table, seen_begin, seen_end, length,
        positions, scale, window, kv_heads, kv_head, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, BLOCK_KEYS, BLOCK_DIM, False,
    )  # fmt: skip
    result, top, total = _attend(
        result, top, total, q_tile, k_cache, v_cache, table, seen_end, end, length,
        positions, scale, window, kv_heads, kv_head, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, BLOCK_KEYS, BLOCK_DIM, True,
    )  # fmt: skip
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = (token_rows * (kv_heads * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=row_mask)
