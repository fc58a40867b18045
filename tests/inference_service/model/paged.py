"""Drives a decoder through paged batches as the engine would: shuffled blocks, single tokens first, then chunks."""

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from inference_service.model.attention import KVCache
from inference_service.model.batch import ForwardBatch
from inference_service.model.decoder import Decoder


class PagedRun:
    """Sequences by name over one KV cache whose unwritten slots are NaN. `step` adds tokens to some of them."""

    def __init__(self, decoder: Decoder, block_size: int = 4, num_blocks: int = 96, seed: int = 0) -> None:
        c, weight = decoder.config, decoder.embed
        self.decoder = decoder
        self.cache = KVCache(
            c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, weight.dtype, weight.device
        )
        self.cache.k.fill_(float("nan"))
        self.cache.v.fill_(float("nan"))
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """One forward pass over the new tokens of each sequence; their logits, [tokens, vocab] by name."""
        work = dict(sorted(work.items(), key=lambda item: len(item[1]) > 1))
        batch = self.batch(work)
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder(batch, self.cache))
        return dict(zip(work, logits.split([len(tokens) for tokens in work.values()]), strict=True))

    def batch(self, work: Mapping[str, Sequence[int]]) -> ForwardBatch:
        device, size = self.decoder.embed.device, self.cache.block_size
        positions, slots, starts = [], [], [0]
        for name, tokens in work.items():
            first = self.lengths.get(name, 0)
            blocks = self.blocks.setdefault(name, [])
            self.lengths[name] = first + len(tokens)
            while len(blocks) * size < self.lengths[name]:
                blocks.append(self.free.pop())
            positions += range(first, self.lengths[name])
            slots += [blocks[p // size] * size + p % size for p in range(first, self.lengths[name])]
            starts.append(starts[-1] + len(tokens))
        longest = max(len(self.blocks[name]) for name in work)
        tables = [self.blocks[name] + [0] * (longest - len(self.blocks[name])) for name in work]
        return ForwardBatch(
            token_ids=torch.tensor([t for tokens in work.values() for t in tokens], device=device),
            positions=torch.tensor(positions, device=device),
            kv_slots=torch.tensor(slots, device=device),
            query_starts=tuple(starts),
            context_lens=tuple(self.lengths[name] for name in work),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            num_decodes=sum(len(tokens) == 1 for tokens in work.values()),
            logit_rows=torch.arange(starts[-1], device=device),
        )

    def fork(self, source: str, name: str, length: int) -> None:
        """`name` begins with the first `length` tokens of `source`, in the same blocks (whole ones only)."""
        assert length % self.cache.block_size == 0
        self.blocks[name] = self.blocks[source][: length // self.cache.block_size]
        self.lengths[name] = length
