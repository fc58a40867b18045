import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from inference_service.engine.blocks import BlockAllocator, ChainSeed, chain_seed, extend_chain

BLOCK_SIZE = 4


SEED = ChainSeed(b"seed")


def chain(token_ids, seed=SEED):
    hashes = []
    extend_chain(hashes, seed, token_ids, BLOCK_SIZE, len(token_ids) // BLOCK_SIZE)
    return hashes


def test_chain_names_a_block_by_everything_before_it():
    first, second = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert chain([1, 2, 3, 4]) == first[:1]
    assert len(chain([1, 2, 3, 4, 5])) == 1


@pytest.mark.parametrize(
    "other",
    [("b", "w", "d", "s"), ("a", "x", "d", "s"), ("a", "w", None, "s"), ("a", "w", "d", ""), ("aw", "", "d", "s")],
)
def test_seed_separates_tenant_weights_adapter_and_salt(other):
    assert chain_seed("a", "w", "d", "s") != chain_seed(*other)


def test_released_blocks_are_found_until_reused_oldest_first():
    blocks = BlockAllocator(3, BLOCK_SIZE)
    hashes = chain(list(range(12)))
    held = blocks.allocate(3)
    for block, name in zip(held, hashes, strict=True):
        blocks.name(block, name)
    blocks.release(held)
    assert blocks.find(hashes) == held
    reused = blocks.allocate(1)
    assert reused == [held[2]]  # the tail of a prefix goes first
    assert blocks.find(hashes) == held[:2]
    blocks.check_integrity([reused])


def test_more_than_is_free_is_refused_and_double_release_too():
    blocks = BlockAllocator(2, BLOCK_SIZE)
    held = blocks.allocate(2)
    with pytest.raises(ValueError, match="1 blocks wanted"):
        blocks.allocate(1)
    blocks.release(held)
    with pytest.raises(ValueError, match="once too often"):
        blocks.release(held)


class Allocations(RuleBasedStateMachine):
    """Sequences over few distinct tokens share, name, and release blocks in any order."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.blocks = BlockAllocator(8, BLOCK_SIZE)
        self.content = {}  # block -> tokens up to its end, as the KV cache would hold them
        self.held = []

    @rule(target=sequences, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, token_ids):
        hashes = chain(token_ids)
        found = self.blocks.find(hashes)
        for index, block in enumerate(found):
            assert self.content[block] == token_ids[: (index + 1) * BLOCK_SIZE]
        num_new = self.blocks.blocks_for(len(token_ids)) - len(found)
        if num_new > self.blocks.num_free - self.blocks.num_free_among(found):
            return []
        self.blocks.acquire(found)
        held = found + self.blocks.allocate(num_new)
        for index, block in enumerate(held):
            if index < len(hashes):
                self.content[block] = token_ids[: (index + 1) * BLOCK_SIZE]
                self.blocks.name(block, hashes[index])
        self.held.append(held)
        return held

    @rule(held=consumes(sequences))
    def stop(self, held):
        if held:
            self.blocks.release(held)
            self.held = [other for other in self.held if other is not held]

    @invariant()
    def integrity(self):
        self.blocks.check_integrity(self.held)
        distinct = {block for held in self.held for block in held}
        assert self.blocks.num_free == self.blocks.num_blocks - len(distinct)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
