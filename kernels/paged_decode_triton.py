# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Decode attention on a GPU, split over the keys (flash decoding). Semantics: `kernels.paged_attention.paged_decode`.

A program takes one sequence, one KV head with all its query heads, and one part of the keys. Each sequence's own keys
are divided evenly, so the number of parts is a matter of the launch and the parts are a matter of the row alone. With
one part the program writes the result; with more a second kernel combines what the parts left.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64
MIN_GROUP = 16  # rows of the smallest tensor core product
TARGET_PROGRAMS = 2 * 132  # two a multiprocessor of an H200
MIN_SPLIT_KEYS = 128
MAX_SPLITS = 32
# Long contexts differ much in length: more parts than the multiprocessors need keep them evenly busy.
UNEVEN_KEYS, UNEVEN_SPLITS, UNEVEN_PROGRAMS = 2048, 4, 1024


def num_splits(num_seqs: int, num_kv_heads: int, max_len: int) -> int:
    """Parts of the keys, a power of two, from what is fixed for a batch bucket."""
    programs = num_seqs * num_kv_heads
    wanted = triton.cdiv(TARGET_PROGRAMS, programs) if programs < TARGET_PROGRAMS * 3 // 4 else 1
    if programs < UNEVEN_PROGRAMS:
        wanted = max(wanted, min(UNEVEN_SPLITS, max_len // UNEVEN_KEYS))
    wanted = min(wanted, triton.cdiv(max_len, MIN_SPLIT_KEYS), MAX_SPLITS)
    floor: int = 2 ** (max(wanted, 1).bit_length() - 1)
    return floor


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_len: int,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `kernels.paged_attention.paged_decode`. `splits` overrides `num_splits`."""
    (seqs, heads, head_dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    if out is None:
        out = torch.empty((seqs, heads, head_dim), dtype=q.dtype, device=q.device)
    longest = min(max_len, window) if window > 0 else max_len
    splits = splits or num_splits(seqs, kv_heads, longest)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((seqs, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((seqs, heads, splits), dtype=torch.float32, device=q.device)
    block_dim = max(triton.next_power_of_2(head_dim), 16)
    wide = q.element_size() * block_dim > 256
    _decode[kv_heads, splits, seqs](
        q, k_cache, v_cache, block_tables, seq_lens, out, partial, lse,
        scale * math.log2(math.e), window, q.stride(0), block_tables.stride(0),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLITS=splits, HAS_WINDOW=window > 0,
        BLOCK_GROUP=max(triton.next_power_of_2(heads // kv_heads), MIN_GROUP), BLOCK_DIM=block_dim,
        BLOCK_KEYS=BLOCK_KEYS // 2 if wide else BLOCK_KEYS, num_warps=4, num_stages=5,
    )  # fmt: skip
    if splits > 1:
        _combine[heads, seqs](
            partial, lse, seq_lens, out,
            HEAD_DIM=head_dim, BLOCK_DIM=block_dim, SPLITS=splits, num_warps=2 if splits <= 8 else 4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window", "stride_table"], do_not_specialize_on_alignment=["block_tables", "seq_lens"])
def _decode(
    q, k_cache, v_cache, block_tables, seq_lens, out, partial, lse, scale, window, stride_q, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(0)
    length = tl.load(seq_lens + seq)
    if length < 0:
        return
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - start, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    begin = start + split * part
    end = tl.minimum(begin + part, length)

    members, dims = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    heads = kv_head * GROUP + members
    head_mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + seq * stride_q + heads[:, None] * HEAD_DIM + dims[None, :], mask=head_mask, other=0.0)
    table = block_tables + seq * stride_table
    top = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    result = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        in_part = keys < end
        block = tl.load(table + keys // BLOCK_SIZE, mask=in_part, other=0).to(tl.int64)
        slots = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * kv_heads + kv_head
        offsets = slots[:, None] * HEAD_DIM + dims[None, :]
        mask = in_part[:, None] & (dims < HEAD_DIM)[None, :]
        k_tile = tl.load(k_cache + offsets, mask=mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where(in_part[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        v_tile = tl.load(v_cache + offsets, mask=mask, other=0.0)
        result = tl.dot(weights.to(v_tile.dtype), v_tile, result * shrink[:, None], input_precision="ieee")
        top = higher

    result = result / tl.where(total > 0, total, 1.0)[:, None]
    rows = seq * kv_heads * GROUP + heads
    if SPLITS == 1:
        tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=head_mask)
    else:
        parts = rows * SPLITS + split
        tl.store(lse + parts, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=members < GROUP)
        if end > begin:
            tl.store(partial + parts[:, None] * HEAD_DIM + dims[None, :], result, mask=head_mask)


@triton.jit(do_not_specialize_on_alignment=["seq_lens"])
def _combine(
    partial, lse, seq_lens, out, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    seq = tl.program_id(1).to(tl.int64)
    if tl.load(seq_lens + seq) < 0:
        return
    row = seq * tl.num_programs(0) + tl.program_id(0)
    parts, dims = row * SPLITS + tl.arange(0, SPLITS), tl.arange(0, BLOCK_DIM)
    logs = tl.load(lse + parts)
    top = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    mask = (logs > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
