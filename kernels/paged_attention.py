"""Attention over the paged KV cache, for decode rows and for prefill chunks: the doors and the references.

The tokens' own K and V are in the cache already (`kernels.rotary`). Lengths are device data, and launches depend on
shapes and host bounds alone. Nothing beyond a sequence's own tokens is read, whatever its blocks hold there.
"""

from itertools import pairwise

import torch
from torch import Tensor


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
) -> Tensor:
    """One query a sequence, its last token. Returns `[seqs, heads, head_dim]` in q's dtype.

    Semantics: out[s, h] = softmax(scale · q[s, h] Kᵀ) V over the last `window` of the sequence's `seq_lens[s]` tokens,
    in float32; query heads share KV heads in runs of heads / kv_heads.

    Args:
        q: `[seqs, heads, head_dim]`, the last two dimensions contiguous.
        k_cache, v_cache: `[blocks, block_size, kv_heads, head_dim]`, contiguous.
        block_tables: `[seqs, max_blocks]` int32.
        seq_lens: `[seqs]` int32, this token included. At 0 zeros come out; at −1 `out` stays as it is.
        max_len: Host bound of `seq_lens`. Together with the shapes it fixes the launch, so give a bucket's bound.
        scale: Of the scores, usually 1 / √head_dim.
        window: Number of tokens a position sees, itself included; 0 for all.
        out: `[seqs, heads, head_dim]` contiguous, or None to allocate.
    """
    if q.is_cuda:
        from kernels import paged_decode_triton

        return paged_decode_triton.paged_decode(
            q, k_cache, v_cache, block_tables, seq_lens, max_len=max_len, scale=scale, window=window, out=out
        )
    out = torch.empty_like(q) if out is None else out
    return paged_decode_reference(q, k_cache, v_cache, block_tables, seq_lens, scale=scale, window=window, out=out)


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
) -> Tensor:
    """Chunks of several sequences, each the last tokens of its sequence. Returns `[tokens, heads, head_dim]`.

    Semantics: as `paged_decode` for every token, over the tokens up to itself. Rows before the first chunk and past the
    last one stay unwritten.

    Args:
        q: `[tokens, heads, head_dim]`, the last two dimensions contiguous.
        k_cache, v_cache: `[blocks, block_size, kv_heads, head_dim]`, contiguous.
        block_tables: `[sequences, max_blocks]` int32.
        query_starts: `[chunks + 1]` int32, ascending; chunk c owns the rows `query_starts[c]:query_starts[c + 1]`,
            maybe none (padding chunks repeat the last value). The `query_starts[0]` rows before them are of as many
            sequences, so that chunk c is of sequence `query_starts[0] + c`.
        seq_lens: `[sequences]` int32, tokens in the cache, the chunk included.
        scale: Of the scores, usually 1 / √head_dim.
        window: Number of tokens a position sees, itself included; 0 for all.
        out: `[tokens, heads, head_dim]` contiguous, or None to allocate.
    """
    if q.is_cuda:
        from kernels import paged_prefill_triton

        return paged_prefill_triton.paged_prefill(
            q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale=scale, window=window, out=out
        )
    out = torch.empty_like(q) if out is None else out
    return paged_prefill_reference(
        q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale=scale, window=window, out=out
    )


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    out: Tensor,
) -> Tensor:
    """See `paged_decode`."""
    for s, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[s] = 0
        elif length > 0:
            k, v = (gather_reference(cache, block_tables[s], length) for cache in (k_cache, v_cache))
            out[s] = attend_reference(q[s : s + 1], k, v, scale, window)[0]
    return out


def paged_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    out: Tensor,
) -> Tensor:
    """See `paged_prefill`."""
    starts = query_starts.tolist()
    lens = seq_lens.tolist()
    for s, (begin, end) in enumerate(pairwise(starts), starts[0]):
        if end > begin:
            k, v = (gather_reference(cache, block_tables[s], lens[s]) for cache in (k_cache, v_cache))
            out[begin:end] = attend_reference(q[begin:end], k, v, scale, window)
    return out


def gather_reference(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one sequence, `[length, kv_heads, head_dim]`."""
    positions = torch.arange(length, device=cache.device)
    block_size = cache.shape[1]
    return cache[block_table[positions // block_size].long(), positions % block_size]


def attend_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """`q` `[queries, heads, head_dim]`, the last of the `[keys, kv_heads, head_dim]` tokens in `k`, `v`; as q."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * scale
    keys = torch.arange(k.shape[0], device=q.device)
    queries = keys[k.shape[0] - q.shape[0] :, None]
    hidden = keys > queries
    if window > 0:
        hidden |= keys <= queries - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
