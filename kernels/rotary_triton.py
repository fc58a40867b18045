# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""Rotary embeddings and the KV write on a GPU, one launch. Semantics: `kernels.rotary`.

A program takes one token and a few neighbouring heads of the packed q, k and v, both halves of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rotary import HeadNorm

BLOCK_HEADS = 8


def rotary_kv_write(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    head_norm: HeadNorm | None = None,
    q_out: Tensor | None = None,
    delta: Tensor | None = None,
) -> Tensor:
    """See `kernels.rotary.rotary_kv_write`."""
    tokens, (kv_heads, head_dim) = qkv.shape[0], k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if q_out is None:
        q_out = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = head_norm or (qkv, qkv, 0.0)
    _rotary_kv_write[tokens, triton.cdiv(num_heads + 2 * kv_heads, BLOCK_HEADS)](
        qkv, qkv if delta is None else delta, q_out, table, positions, kv_slots, q_weight, k_weight,
        k_cache, v_cache, eps, qkv.stride(0),
        HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, QK_NORM=head_norm is not None, DELTA=delta is not None,
        BLOCK_HEADS=BLOCK_HEADS, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=2,
    )  # fmt: skip
    return q_out


@triton.jit
def _head_norm(x, inverse, weight, columns, is_q, k_weight, mask, dtype: tl.constexpr):
    normed = (x * inverse).to(dtype).to(tl.float32)
    q_gain = tl.load(weight + columns, mask=mask, other=0.0)
    k_gain = tl.load(k_weight + columns, mask=mask, other=0.0)
    gain = tl.where(is_q, q_gain[None, :].to(tl.float32), k_gain[None, :].to(tl.float32))
    return (normed * gain).to(weight.dtype.element_ty).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots"])
def _rotary_kv_write(
    qkv, delta, q_out, table, positions, kv_slots, q_weight, k_weight, k_cache, v_cache, eps, stride_qkv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, DELTA: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    columns = tl.arange(0, BLOCK_HALF)
    in_half = columns < HALF
    mask = (heads < HEADS + 2 * KV_HEADS) & in_half[None, :]
    source = qkv + token * stride_qkv + heads * HEAD_DIM + columns[None, :]
    raw1 = tl.load(source, mask=mask, other=0.0)
    raw2 = tl.load(source + HALF, mask=mask, other=0.0)
    if DELTA:
        delta += token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + heads * HEAD_DIM + columns[None, :]
        raw1 = (raw1.to(tl.float32) + tl.load(delta, mask=mask, other=0.0)).to(dtype)
        raw2 = (raw2.to(tl.float32) + tl.load(delta + HALF, mask=mask, other=0.0)).to(dtype)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    if QK_NORM:
        square = tl.sum(x1 * x1 + x2 * x2, axis=1) / HEAD_DIM
        inverse = tl.rsqrt(square + eps)[:, None]
        x1 = _head_norm(x1, inverse, q_weight, columns, heads < HEADS, k_weight, in_half, dtype)
        x2 = _head_norm(x2, inverse, q_weight, columns + HALF, heads < HEADS, k_weight, in_half, dtype)
    angles = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + columns
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)[None, :]
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    is_q = mask & (heads < HEADS)
    target = q_out + (token * HEADS + heads) * HEAD_DIM + columns[None, :]
    tl.store(target, y1, mask=is_q)
    tl.store(target + HALF, y2, mask=is_q)
    slot = tl.load(kv_slots + token).to(tl.int64)
    if slot >= 0:
        is_k = mask & (heads >= HEADS) & (heads < HEADS + KV_HEADS)
        keys = k_cache + (slot * KV_HEADS + heads - HEADS) * HEAD_DIM + columns[None, :]
        tl.store(keys, y1.to(k_cache.dtype.element_ty), mask=is_k)
        tl.store(keys + HALF, y2.to(k_cache.dtype.element_ty), mask=is_k)
        is_v = mask & (heads >= HEADS + KV_HEADS)
        values = v_cache + (slot * KV_HEADS + heads - HEADS - KV_HEADS) * HEAD_DIM + columns[None, :]
        tl.store(values, raw1.to(v_cache.dtype.element_ty), mask=is_v)
        tl.store(values + HALF, raw2.to(v_cache.dtype.element_ty), mask=is_v)
