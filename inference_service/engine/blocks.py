"""The paged KV cache's bookkeeping: which block holds what, who refers to it, and which may be reused.

A full block is named by a hash chain over everything before it, so equal names mean equal keys and values. A free block
keeps its name until it is handed out again, oldest first: that is the whole prefix cache.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple


class ChainSeed(NamedTuple):
    """The roots of a sequence's hash chain.

    From the block with position `start` on, what it holds depends on an adapter that acts from there: then `branch` is
    mixed in. The blocks before it are those of the base model, and shared with everybody of the same `root`.
    """

    root: bytes
    branch: bytes = b""
    start: int = 0


def chain_seed(
    tenant: str, weights_fingerprint: str, adapter_digest: str | None, cache_salt: str, adapter_start: int = 0
) -> ChainSeed:
    """The seed of a hash chain: whatever may not be shared between requests is in it.

    `adapter_start`: the first position that the adapter acts on.
    """
    if adapter_digest is None or not adapter_start:
        return ChainSeed(_hash(tenant, weights_fingerprint, adapter_digest or "", cache_salt))
    root = _hash(tenant, weights_fingerprint, "", cache_salt)
    return ChainSeed(root, _hash(adapter_digest, str(adapter_start)), adapter_start)


def _hash(*parts: str) -> bytes:
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in encoded), digest_size=32).digest()


def extend_chain(
    hashes: list[bytes], seed: ChainSeed, token_ids: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Extend `hashes` in place to the names of the first `num_blocks` full blocks of `token_ids`."""
    for block in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else seed.root
        if seed.branch and block == seed.start // block_size:
            parent += seed.branch
        tokens = array("i", token_ids[block * block_size : (block + 1) * block_size])
        hashes.append(blake2b(parent + tokens.tobytes(), digest_size=32).digest())


class BlockAllocator:
    """Hands out block ids 0…num_blocks-1 with reference counts, and finds blocks again by name.

    Args:
        num_blocks: Blocks in the KV cache.
        block_size: Tokens per block.
        prefix_caching: Whether blocks get names at all.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused first

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, named or not."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of `names` that is cached. Refers to none of them yet."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave the free list if they were acquired."""
        return sum(self._references[block] == 0 for block in blocks)

    def is_held_once(self, block: int) -> bool:
        """Whether it becomes free with the next `release`."""
        return self._references[block] == 1

    def acquire(self, blocks: Iterable[int]) -> None:
        """Refer once more to each of `blocks` (found by name)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks without content, each referred to once. The caller has checked `num_free`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        return [self._allocate_one() for _ in range(count)]

    def name(self, block: int, name: bytes) -> None:
        """`block` is full and computed: let others find it. The first block of a name keeps it."""
        if self.prefix_caching and name not in self._by_name and self._names[block] is None:
            self._names[block] = name
            self._by_name[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's `blocks`; the last ones become reusable first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} released once too often")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._names[block] is None:  # holds nothing anyone can find
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, holders: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless counts, names and the free list agree with each other and with `holders`."""
        expected = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        assert expected == self._references, "reference counts differ from what sequences hold"
        assert set(self._free) == {b for b, count in enumerate(self._references) if count == 0}, "free list is wrong"
        named = {name: block for block, name in enumerate(self._names) if name is not None}
        assert named == self._by_name, "names and blocks disagree"

    def _allocate_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None
        self._references[block] = 1
        return block
