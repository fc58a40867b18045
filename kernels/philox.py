"""Sampling noise that depends on (seed, index, position, token id) only: Philox-4x32-10, counter based.

Plain integer arithmetic on int64 arrays of numpy or torch, whichever the counters are; the integers are those of
`tl.philox`. A token's word is word `token % 4` of the counter (token // 4, position, index, 0) under the key `seed`,
its low half first. Source of the constants: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
LANES = 4
UNIFORM_BITS = 23


class Words(NamedTuple):
    """Four words below 2**32, as int64 arrays of one shape."""

    w0: Any
    w1: Any
    w2: Any
    w3: Any


def philox(counter: Words, key_0: Any, key_1: Any) -> Words:
    """Ten rounds. `counter` and keys: int64 arrays (numpy or torch) that broadcast; values below 2**32.

    Products wrap at 64 bits; as signed integers their upper half is masked after the arithmetic shift.
    """
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1 = ((product_1 >> 32) & MASK) ^ (c1 ^ key_0), product_1 & MASK
        c2, c3 = ((product_0 >> 32) & MASK) ^ (c3 ^ key_1), product_0 & MASK
        key_0, key_1 = (key_0 + WEYL_0) & MASK, (key_1 + WEYL_1) & MASK
    return Words(c0, c1, c2, c3)


def token_noise(groups: Any, seed: Any, index: Any, position: Any) -> Words:
    """The words of tokens `4 * groups + lane`, lane 0…3. All int64 arrays (not scalars, which warn of overflow) that
    broadcast; `seed` holds 64 bits."""
    return philox(Words(groups, position & MASK, index & MASK, 0 * index), seed & MASK, (seed >> 32) & MASK)


def token_bits(vocab: int, seed: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """32 random bits for every token, `[rows, vocab]` int64. `seed` (64 bits), `index`, `position`: `[rows]` int64."""
    seed, index, position = (column.to(torch.int64)[:, None] for column in (seed, index, position))
    groups = torch.arange(-(-vocab // LANES), device=seed.device)[None]
    words = token_noise(groups, seed, index, position)
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab]  # type: ignore[no-untyped-call]


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)), by 32 random bits; u, exact in float32, is the middle of a 2**23rd."""
    uniform = ((bits >> (32 - UNIFORM_BITS)).to(torch.float32) + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log(uniform))
