"""Paged attention in plain PyTorch: the KV cache, the plan of one step, and the attention that follows it.

Every sequence gathers the slots of its own tokens and nothing else: what other sequences left in a shared or recycled
block (NaN of a broken adapter, say) cannot reach it, not even through a masked position.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inference_service.model.batch import ForwardBatch

SHORT_CONTEXT = 512  # single queries up to this many keys share one padded call: another call costs more than padding


class KVCache:
    """Keys and values of all layers, in blocks of `block_size` tokens.

    `k`, `v`: [layers, blocks, block_size, kv_heads, head_dim]. A slot is block · block_size + offset.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k`, `v` [tokens, kv_heads, head_dim] at `slots` [tokens] of `layer`, in place."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of K and V at `slots` [n] of `layer`, each [n, kv_heads, head_dim]."""
        # Whole rows, not [kv_heads, head_dim] items: index_select then copies each with one memcpy.
        k, v = (cache[layer].flatten(2).flatten(0, 1).index_select(0, slots) for cache in (self.k, self.v))
        heads = (-1, *self.k.shape[3:])
        return k.view(heads), v.view(heads)


class SingleQueries(NamedTuple):
    """Sequences with one query each that attend in one padded call. `mask` is None if no row is padded."""

    rows: Tensor | None  # [seqs] token rows; None: all rows of the batch, in order
    slots: Tensor  # [seqs * keys]
    mask: Tensor | None  # [seqs, 1, 1, keys], 0 or -inf


class Chunk(NamedTuple):
    """Several queries of one sequence, at token rows begin:end.

    `slots` is None if the sequence has no earlier tokens: its keys are then those of this step. `mask` None is causal.
    """

    begin: int
    end: int
    slots: Tensor | None  # [keys]
    mask: Tensor | None  # [queries, keys], 0 or -inf


class WindowPlan(NamedTuple):
    """The calls that together cover all token rows, for layers of one sliding window."""

    singles: tuple[SingleQueries, ...]
    chunks: tuple[Chunk, ...]


class AttentionPlan(NamedTuple):
    """What attention needs to know of one step, the same for all layers. One `WindowPlan` per layer."""

    kv_slots: Tensor
    by_layer: tuple[WindowPlan, ...]


def plan_attention(
    batch: ForwardBatch, sliding_windows: Sequence[int | None], block_size: int, dtype: torch.dtype
) -> AttentionPlan:
    """Index tensors and masks of one step. `sliding_windows`: per layer, the tokens a position sees, or None for all.

    `dtype` is that of the queries (and so of the masks).
    """
    longest = max(batch.context_lens)
    windows = [min(window or longest, longest) for window in sliding_windows]
    plans = {window: _plan_window(batch, window, block_size, dtype) for window in set(windows)}
    return AttentionPlan(batch.kv_slots, tuple(plans[window] for window in windows))


def _plan_window(batch: ForwardBatch, window: int, block_size: int, dtype: torch.dtype) -> WindowPlan:
    starts = batch.query_starts
    lengths = [end - begin for begin, end in pairwise(starts)]
    singles = [s for s, length in enumerate(lengths) if length == 1]
    groups = _by_context(singles, [min(n, window) for n in batch.context_lens])
    return WindowPlan(
        tuple(_plan_singles(batch, seqs, window, block_size, dtype) for seqs in groups),
        tuple(_plan_chunk(batch, s, window, block_size, dtype) for s, length in enumerate(lengths) if length > 1),
    )


def _by_context(seqs: Iterable[int], num_keys: Sequence[int]) -> list[list[int]]:
    """Groups of similar numbers of keys: within a group no row is padded to twice its length or more."""
    groups: dict[int, list[int]] = defaultdict(list)
    for s in seqs:
        groups[max(num_keys[s] - 1, SHORT_CONTEXT - 1).bit_length()].append(s)
    return list(groups.values())


def _plan_singles(
    batch: ForwardBatch, seqs: list[int], window: int, block_size: int, dtype: torch.dtype
) -> SingleQueries:
    device = batch.block_tables.device
    ends = [batch.context_lens[s] for s in seqs]
    num_keys = [min(end, window) for end in ends]
    last = torch.tensor(ends, device=device)[:, None] - 1  # [seqs, 1]
    first = last + 1 - torch.tensor(num_keys, device=device)[:, None]
    positions = first + torch.arange(max(num_keys), device=device)  # [seqs, keys]
    whole_batch = len(seqs) == batch.token_ids.shape[0]
    tables = batch.block_tables if whole_batch else batch.block_tables[torch.tensor(seqs, device=device)]
    slots = _slots(tables, torch.minimum(positions, last), block_size)
    mask = None if min(num_keys) == max(num_keys) else _mask(positions > last, dtype)[:, None, None]
    rows = None if whole_batch else torch.tensor([batch.query_starts[s] for s in seqs], device=device)
    return SingleQueries(rows, slots.flatten(), mask)


def _plan_chunk(batch: ForwardBatch, s: int, window: int, block_size: int, dtype: torch.dtype) -> Chunk:
    begin, end = batch.query_starts[s], batch.query_starts[s + 1]
    context, device = batch.context_lens[s], batch.block_tables.device
    earlier = context - (end - begin)
    if earlier == 0 and context <= window:
        return Chunk(begin, end, None, None)
    first = max(0, earlier - window + 1)
    keys = torch.arange(first, context, device=device)
    queries = torch.arange(earlier, context, device=device)[:, None]
    hidden = (keys > queries) | (keys <= queries - window)
    slots = None if earlier == 0 else _slots(batch.block_tables[s : s + 1], keys[None], block_size)[0]
    return Chunk(begin, end, slots, _mask(hidden, dtype))


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots of `positions` [seqs, n] by block `tables` [seqs, max_blocks]."""
    return tables.gather(1, positions // block_size) * block_size + positions % block_size


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan, kv_cache: KVCache) -> Tensor:
    """softmax(q Kᵀ / √head_dim) V over each sequence's own tokens, this step's included.

    `q` [tokens, heads, head_dim]; `k`, `v` [tokens, kv_heads, head_dim] are written to the cache first.
    Returns [tokens, heads * head_dim].
    """
    kv_cache.write(layer, plan.kv_slots, k, v)
    singles, chunks = plan.by_layer[layer]
    if len(singles) == 1 and singles[0].rows is None:
        return _attend_singles(q, layer, singles[0], kv_cache)
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    for group in singles:
        out.index_copy_(0, group.rows, _attend_singles(q[group.rows], layer, group, kv_cache))  # type: ignore[arg-type]
    for chunk in chunks:
        rows = slice(chunk.begin, chunk.end)
        keys, values = (k[rows], v[rows]) if chunk.slots is None else kv_cache.read(layer, chunk.slots)
        out[rows] = _attend_chunk(q[rows], keys, values, chunk.mask)
    return out


def _attend_singles(q: Tensor, layer: int, group: SingleQueries, kv_cache: KVCache) -> Tensor:
    """`q` [seqs, heads, head_dim] → [seqs, heads * head_dim]. The query heads of one KV head are its query rows."""
    seqs, heads, head_dim = q.shape
    k, v = (x.view(seqs, -1, *x.shape[1:]).transpose(1, 2) for x in kv_cache.read(layer, group.slots))
    grouped = q.view(seqs, k.shape[1], -1, head_dim)  # [seqs, kv_heads, heads / kv_heads, head_dim]
    return scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(seqs, heads * head_dim)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`q` [queries, heads, head_dim], `k`, `v` [keys, kv_heads, head_dim] → [queries, heads * head_dim].

    KV heads take the batch dimension; their query heads see them through an expanded (uncopied) view.
    """
    queries, heads, head_dim = q.shape
    grouped = q.transpose(0, 1).view(
        k.shape[1], -1, queries, head_dim
    )  # [kv_heads, heads / kv_heads, queries, head_dim]
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None)
    return out.flatten(0, 1).transpose(0, 1).reshape(queries, heads * head_dim)
