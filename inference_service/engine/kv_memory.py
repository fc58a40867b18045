"""What sequences hold of the KV cache: found when they are admitted, extended as they grow, named when it is full."""

from array import array

from inference_service.engine.blocks import BlockAllocator, extend_chain
from inference_service.engine.sequence import Sequence
from inference_service.engine.step import Chunk


class KvMemory:
    """Blocks of sequences.

    Args:
        blocks: All there are.
    """

    def __init__(self, blocks: BlockAllocator) -> None:
        self.blocks = blocks

    def missing(self, sequence: Sequence, spare: int, victims: list[Sequence] | None = None) -> int:
        """Blocks that are not free for all known tokens of a waiting sequence, with `spare` beside; at most 0 if it
        fits. With `victims`: if these gave theirs up, counting what they alone hold."""
        blocks = self.blocks
        cached = self._cached(sequence)
        num_new = blocks.blocks_for(len(sequence.token_ids)) - len(cached)
        missing = num_new + blocks.num_free_among(cached) + spare - blocks.num_free
        if victims and missing > 0:
            kept = set(cached)
            missing -= sum(blocks.is_held_once(b) and b not in kept for victim in victims for b in victim.blocks)
        return missing

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence that fits its blocks; what the prefix cache has is computed."""
        blocks = self.blocks
        cached = self._cached(sequence)
        blocks.acquire(cached)
        num_new = blocks.blocks_for(len(sequence.token_ids)) - len(cached)
        sequence.blocks = array("i", cached + blocks.allocate(num_new))
        sequence.num_cached = len(cached) * blocks.block_size
        # The last token's logits are needed.
        sequence.num_computed = min(sequence.num_cached, len(sequence.token_ids) - 1)
        sequence.num_named = len(cached)

    def extend(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens of a running sequence; False if there are too few."""
        missing = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.blocks)
        if missing > self.blocks.num_free:
            return False
        sequence.blocks.extend(self.blocks.allocate(missing))
        return True

    def release(self, sequence: Sequence) -> None:
        """Give up all of them."""
        self.blocks.release(sequence.blocks)
        sequence.blocks = array("i")
        sequence.num_computed = sequence.num_named = 0

    def name(self, chunk: Chunk) -> None:
        """`chunk` has been computed: let others find the blocks that are full now."""
        sequence, blocks = chunk.sequence, self.blocks
        num_full = chunk.end // blocks.block_size
        if blocks.prefix_caching and num_full > sequence.num_named:
            self._extend_hashes(sequence, num_full)
            for index in range(sequence.num_named, num_full):
                blocks.name(sequence.blocks[index], sequence.hashes[index])
            sequence.num_named = num_full

    def _cached(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix, all of it at best."""
        if not self.blocks.prefix_caching or sequence.wants_prompt_logprobs:
            return []
        num_full = len(sequence.token_ids) // self.blocks.block_size
        self._extend_hashes(sequence, num_full)
        return self.blocks.find(sequence.hashes[:num_full])

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        seed = sequence.request.cache_seed
        extend_chain(sequence.hashes, seed, sequence.token_ids, self.blocks.block_size, num_blocks)
