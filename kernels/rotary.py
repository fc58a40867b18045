"""Rotary embeddings (RoFormer, arXiv:2104.09864, rotate-half form) and the KV write: the door and the reference."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference import rounded_sum
from kernels.rms_norm import rms_norm_reference


class HeadNorm(NamedTuple):
    """RMSNorm of every query and key head before the rotation (Qwen3). Weights are `[head_dim]`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rotary_table(inverse_frequencies: Tensor, max_position: int, attention_factor: float = 1.0) -> Tensor:
    """cos, then sin, of every position's angles: `[head_dim / 2]` → `[max_position, head_dim]` float32.

    `attention_factor` scales both (YaRN).
    """
    positions = torch.arange(max_position, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), -1) * attention_factor


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
    """Rotate q and k, and store k and v in the paged cache. Returns the rotated q `[tokens, heads, head_dim]`.

    Semantics, per head, x₁ and x₂ its halves (normed first with `head_norm`): (x₁ cos − x₂ sin, x₂ cos + x₁ sin), in
    float32, rounded once; then k_cache[slot] = k, v_cache[slot] = v in place. `qkv` stays as it is.

    With a delta, qkv is first its sum with it, rounded to its dtype.

    Args:
        qkv: `[tokens, (heads + 2 · kv_heads) · head_dim]`, q before k before v, last dimension contiguous.
        table: `[max_position, head_dim]` float32, from `rotary_table`.
        positions: `[tokens]` integers below max_position, in padding rows too.
        kv_slots: `[tokens]` int64, block · block_size + offset; −1 (a padding row) stores nothing.
        k_cache, v_cache: `[blocks, block_size, kv_heads, head_dim]`, contiguous, changed in place.
        head_norm: Weights of the heads' norms, if the model has them.
        q_out: `[tokens, heads, head_dim]` contiguous, or None to allocate.
        delta: Of qkv's shape, float32, contiguous (`kernels.beside`), or None.
    """
    if qkv.is_cuda:
        from kernels import rotary_triton

        return rotary_triton.rotary_kv_write(qkv, table, positions, kv_slots, k_cache, v_cache, head_norm, q_out, delta)
    q = rotary_kv_write_reference(qkv, table, positions, kv_slots, k_cache, v_cache, head_norm, delta)
    return q if q_out is None else q_out.copy_(q)


def rotary_kv_write_reference(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    head_norm: HeadNorm | None = None,
    delta: Tensor | None = None,
) -> Tensor:
    """See `rotary_kv_write`."""
    qkv = rounded_sum(qkv, delta)
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if head_norm is not None:
        q = rms_norm_reference(q, head_norm.q_weight, head_norm.eps)
        k = rms_norm_reference(k, head_norm.k_weight, head_norm.eps)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)  # [tokens, 1, head_dim / 2]
    kept = kv_slots >= 0
    k_cache.view(-1, kv_heads, head_dim)[kv_slots[kept]] = rotate_reference(k, cos, sin)[kept]
    v_cache.view(-1, kv_heads, head_dim)[kv_slots[kept]] = v[kept]
    return rotate_reference(q, cos, sin)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]` by angles with `cos`, `sin` `[tokens, 1, head_dim / 2]`, in x's dtype."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
