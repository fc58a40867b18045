# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Rotary embeddings and the KV write with the expand of q, k and v in it. Semantics: `kernels.rotary`.

A program takes one row and a few neighbouring heads of q, of k or of v, both halves of each. What they
gain is rounded as `kernels.lora.expand` rounds it, but never stored. V heads are the same halves, not rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import rotary_triton
from kernels.delta import add_row, b_tile, constants, find_b, read_chunk
from kernels.lora import add
from kernels.rotary import HeadNorm
from kernels.table import Addend

BLOCK_RANK = 16
BLOCK_HEADS = 2


def rotary_kv_write(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    addend: Addend,
    head_norm: HeadNorm | None = None,
    q_out: Tensor | None = None,
) -> Tensor:
    """See `kernels.rotary.rotary_kv_write`. Chunks of many rows take an expand in place and a rotation."""
    v, adapters, layer, group, chunks = addend
    if chunks.rows_per_chunk > 1:
        add(qkv, addend)
        return rotary_triton.rotary_kv_write(qkv, table, positions, kv_slots, k_cache, v_cache, head_norm, q_out)
    tokens, (kv_heads, head_dim) = qkv.shape[0], k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if q_out is None:
        q_out = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = head_norm or (qkv, qkv, 0.0)
    half = triton.next_power_of_2(head_dim // 2)
    blocks = triton.cdiv(num_heads, BLOCK_HEADS) + 2 * triton.cdiv(kv_heads, BLOCK_HEADS)
    _rotary_kv_write[blocks, chunks.list.shape[0]](
        qkv, q_out, table, positions, kv_slots, q_weight, k_weight, k_cache, v_cache, eps, qkv.stride(0),
        v, adapters.weights, adapters.entries, chunks.list, tokens, layer, group.modules[0], adapters.num_layers,
        **constants(adapters), SPLITS=v.shape[0], BLOCK_RANK=BLOCK_RANK,
        HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, QK_NORM=head_norm is not None,
        BLOCK_HEADS=BLOCK_HEADS, BLOCK_HALF=half, num_warps=max(1, BLOCK_HEADS * half // 256),
    )  # fmt: skip
    return q_out


@triton.jit
def _head_norm(x1, x2, weight, j, in_half, eps, dtype: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Both halves `[heads, half]` of every head, in the model's dtype as float32."""
    square = tl.sum(x1 * x1 + x2 * x2, axis=1) / HEAD_DIM
    inverse = tl.rsqrt(square + eps)[:, None]
    gain1 = tl.load(weight + j, mask=in_half, other=0.0).to(tl.float32)[None, :]
    gain2 = tl.load(weight + j + HEAD_DIM // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = weight.dtype.element_ty
    x1 = ((x1 * inverse).to(dtype).to(tl.float32) * gain1).to(kind).to(dtype).to(tl.float32)
    x2 = ((x2 * inverse).to(dtype).to(tl.float32) * gain2).to(kind).to(dtype).to(tl.float32)
    return x1, x2


@triton.jit(
    do_not_specialize=["num_rows", "layer", "first_module"],
    do_not_specialize_on_alignment=["positions", "kv_slots", "chunks"],
)
def _rotary_kv_write(
    qkv, q_out, table, positions, kv_slots, q_weight, k_weight, k_cache, v_cache, eps, stride_qkv,
    v, weights, entries, chunks, num_rows, layer, first_module, num_layers,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    SIZE: tl.constexpr = BLOCK_HEADS * BLOCK_HALF
    dtype: tl.constexpr = qkv.dtype.element_ty
    slot, row, count = read_chunk(chunks, tl.program_id(1))
    if count == 0:
        return
    block = tl.program_id(0)
    index = (block >= Q_BLOCKS).to(tl.int32) + (block >= Q_BLOCKS + KV_BLOCKS).to(tl.int32)
    first_head = (block - tl.where(index == 0, 0, Q_BLOCKS + (index - 1) * KV_BLOCKS)) * BLOCK_HEADS
    module_heads = tl.where(index == 0, HEADS, KV_HEADS)
    begin = tl.where(index == 0, 0, HEADS + (index - 1) * KV_HEADS) * HEAD_DIM
    # Columns of the first halves, flat and by head, counted from the module's first.
    flat = tl.arange(0, SIZE)
    head, column = first_head + flat // BLOCK_HALF, flat % BLOCK_HALF
    columns, mask = head * HEAD_DIM + column, (head < module_heads) & (column < HALF)
    j = tl.arange(0, BLOCK_HALF)
    in_half = j < HALF
    heads = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    mask2 = (heads < module_heads) & in_half[None, :]
    out_features = module_heads * HEAD_DIM
    b, rank, scale = find_b(weights, entries, slot, layer, first_module + index, num_layers, UNIT, MODULES)
    tile1 = b_tile(b, 0, rank, out_features, columns, mask, BLOCK_RANK)
    tile2 = b_tile(b + HALF, 0, rank, out_features, columns, mask, BLOCK_RANK)
    source = qkv + row * stride_qkv + begin + columns
    kv_slot = tl.load(kv_slots + row).to(tl.int64)
    angles = table + tl.load(positions + row).to(tl.int64) * HEAD_DIM + j
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)[None, :]
    raw1, raw2 = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
    raw1 = add_row(
        raw1, tile1, b, scale, v, row, index, rank, num_rows, out_features, columns, mask,
        3, SPLITS, MAX_RANK, BLOCK_RANK,
    )  # fmt: skip
    raw2 = add_row(
        raw2, tile2, b + HALF, scale, v, row, index, rank, num_rows, out_features, columns, mask,
        3, SPLITS, MAX_RANK, BLOCK_RANK,
    )  # fmt: skip
    raw1, raw2 = tl.reshape(raw1, (BLOCK_HEADS, BLOCK_HALF)), tl.reshape(raw2, (BLOCK_HEADS, BLOCK_HALF))
    if index == 2:
        if kv_slot >= 0:
            values = v_cache + (kv_slot * KV_HEADS + heads) * HEAD_DIM + j[None, :]
            tl.store(values, raw1.to(v_cache.dtype.element_ty), mask=mask2)
            tl.store(values + HALF, raw2.to(v_cache.dtype.element_ty), mask=mask2)
    else:
        x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
        if QK_NORM:
            gains = q_weight if index == 0 else k_weight
            x1, x2 = _head_norm(x1, x2, gains, j, in_half, eps, dtype, HEAD_DIM)
        y1, y2 = (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)
        if index == 0:
            target = q_out + (row * HEADS + heads) * HEAD_DIM + j[None, :]
            tl.store(target, y1, mask=mask2)
            tl.store(target + HALF, y2, mask=mask2)
        elif kv_slot >= 0:
            keys = k_cache + (kv_slot * KV_HEADS + heads) * HEAD_DIM + j[None, :]
            tl.store(keys, y1.to(k_cache.dtype.element_ty), mask=mask2)
            tl.store(keys + HALF, y2.to(k_cache.dtype.element_ty), mask=mask2)
