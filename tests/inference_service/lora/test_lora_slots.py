"""The slot table: any sequence of operations keeps it whole, and its answers are those of a plain model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_service.lora.gaps import UNIT, Range, coalesce, complement, fit
from inference_service.lora.slots import Handle, SlotTable, StaleHandle
from inference_service.types import BlobLayout, ChunkLayout
from shared.errors import AdapterMemory


def layout(*units: int, rank: int = 8) -> BlobLayout:
    """One chunk a layer, of so many units; a little under, since sizes are rounded up."""
    chunks, offset = [], 0
    for layer, size in enumerate(units):
        chunks.append(ChunkLayout(layer, offset, size * UNIT - 16, ()))
        offset += size * UNIT - 16
    return BlobLayout(offset, rank, "float32", tuple(chunks))


def table(units: int = 8, slots: int = 4) -> SlotTable:
    return SlotTable(slots, units * UNIT + 100)


def place(slots: SlotTable, digest: str, *units: int, pinned: bool = False) -> Handle:
    """Reserve and let go of the reservation's reference."""
    placement = slots.reserve(digest, layout(*units), pinned)
    assert placement is not None
    slots.release(placement.handle)
    return placement.handle


def test_an_adapter_alone_is_one_piece() -> None:
    slots = table()
    placement = slots.reserve("a", layout(1, 2, 1))
    assert placement == ((0, 1), (0, UNIT, 3 * UNIT), ())
    assert slots.free_bytes == 4 * UNIT
    slots.check_integrity()


def test_chunks_go_into_any_gap() -> None:
    slots = table(6)
    handles = [place(slots, name, 2) for name in "abc"]
    slots.acquire("b")
    slots.free(handles[0])
    slots.free(handles[2])
    placement = slots.reserve("d", layout(1, 2, 1))
    assert placement is not None
    assert not placement.evicted
    assert sorted(placement.chunk_offsets) == [0, 4 * UNIT, 5 * UNIT]
    slots.check_integrity()


def test_the_least_recently_used_makes_room() -> None:
    slots = table(3)
    for name in "abc":
        place(slots, name, 1)
    slots.touch("a")
    placement = slots.reserve("d", layout(1))
    assert placement is not None
    assert [evicted.digest for evicted in placement.evicted] == ["b"]
    assert placement.handle == Handle(1, 2)


def test_a_slot_is_needed_as_well_as_bytes() -> None:
    slots = table(8, slots=1)
    place(slots, "a", 1)
    placement = slots.reserve("b", layout(1))
    assert placement is not None
    assert placement.evicted[0].digest == "a"


def test_free_bytes_in_no_gap_cost_one_more_victim() -> None:
    slots = table(4)
    handles = [place(slots, name, 1) for name in "abcd"]
    slots.free(handles[0])
    slots.free(handles[2])
    placement = slots.reserve("e", layout(2))
    assert placement is not None
    assert [evicted.digest for evicted in placement.evicted] == ["b"]
    slots.check_integrity()


def test_references_make_it_wait_and_evict_nobody() -> None:
    slots = table(4)
    a = place(slots, "a", 2)
    place(slots, "b", 2)
    slots.acquire("a")
    changes = slots.changes
    assert slots.reserve("c", layout(4)) is None
    assert [resident.digest for resident in slots.residents()] == ["b", "a"]
    assert slots.changes == changes
    assert slots.release(a) == 0
    assert slots.changes > changes
    assert slots.reserve("c", layout(4)) is not None


def test_larger_than_the_arena() -> None:
    with pytest.raises(AdapterMemory, match=r"2304 bytes .* has 2048; enlarge it with --adapter-memory") as caught:
        table().reserve("a", layout(9))
    assert caught.value.retry_after is None
    assert caught.value.metadata == {"bytes_needed": "2304", "arena_bytes": "2048"}


def test_pins_in_the_way() -> None:
    slots = table(4)
    place(slots, "a", 3, pinned=True)
    with pytest.raises(AdapterMemory, match="pinned adapters leave no room for 512 bytes") as caught:
        slots.reserve("b", layout(2))
    assert caught.value.retry_after == 5.0
    assert not slots.can_hold(layout(2))
    assert slots.can_hold(layout(1))
    slots.set_pinned("a", False)
    assert slots.can_hold(layout(2))
    assert slots.reserve("b", layout(2)) is not None


def test_pins_take_all_slots() -> None:
    slots = table(8, slots=1)
    place(slots, "a", 1, pinned=True)
    with pytest.raises(AdapterMemory):
        slots.reserve("b", layout(1))


def test_stale_handles_are_rejected() -> None:
    slots = table()
    old = place(slots, "a", 1)
    slots.free(old)
    new = place(slots, "b", 1)
    assert new.slot == old.slot
    for call in (slots.release, slots.free, slots.resolve):
        with pytest.raises(StaleHandle):
            call(old)
    with pytest.raises(StaleHandle):
        slots.resolve(Handle(3, 0))


def test_misuse_is_rejected() -> None:
    slots = table()
    handle = place(slots, "a", 1)
    with pytest.raises(ValueError, match="a is resident"):
        slots.reserve("a", layout(1))
    with pytest.raises(ValueError, match="no reference"):
        slots.release(handle)
    slots.acquire("a")
    with pytest.raises(ValueError, match="a is referenced"):
        slots.free(handle)


def test_an_adapter_without_chunks() -> None:
    slots = table(1)
    place(slots, "a", 1)
    assert slots.reserve("empty", layout()) == ((1, 1), (), ())
    slots.check_integrity()


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_fit_takes_only_what_is_free(free: list[int], sizes: list[int]) -> None:
    gaps = coalesce(Range(i, i + 1) for i, is_free in enumerate(free) if is_free)
    found = fit(gaps, sizes)
    if found is None:
        assert sum(sizes) > sum(free) or all(gap.size < sum(sizes) for gap in gaps)
        return
    taken = [Range(offset, offset + size) for offset, size in zip(found.offsets, sizes, strict=True)]
    cells = {cell for start, end in gaps for cell in range(start, end)}
    used = [cell for start, end in taken for cell in range(start, end)]
    assert len(used) == len(set(used))
    assert cells - set(used) == {cell for start, end in found.gaps for cell in range(start, end)}
    assert set(used) <= cells


@given(st.sets(st.integers(0, 30)))
def test_complement_twice_is_coalesce(cells: set[int]) -> None:
    ranges = [Range(cell, cell + 1) for cell in cells]
    assert complement(complement(ranges, 31), 31) == coalesce(ranges)


class SlotMachine(RuleBasedStateMachine):
    """Random loads, references, pins and frees over an arena of 12 units and 4 slots."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = table(12, 4)
        self.references: dict[Handle, int] = {}
        self.count = 0

    @rule(sizes=st.lists(st.integers(1, 5), max_size=4), pinned=st.integers(0, 9))
    def reserve(self, sizes: list[int], pinned: int) -> None:
        before = {r.digest: r for r in self.slots.residents()}
        self.count += 1
        try:
            placement = self.slots.reserve(str(self.count), layout(*sizes), pinned == 0)
        except AdapterMemory:
            assert list(before) == [r.digest for r in self.slots.residents()]
            assert sum(sizes) > 12 or any(r.pinned for r in before.values())
            return
        if placement is None:
            assert any(r.references for r in before.values())
            return
        assert all(not before[e.digest].references and not before[e.digest].pinned for e in placement.evicted)
        for evicted in placement.evicted:
            del self.references[evicted.handle]
        self.references[placement.handle] = 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.references)))
        assert self.slots.acquire(self.slots.resolve(handle).digest) == handle
        self.references[handle] += 1

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(h for h, n in self.references.items() if n)))
        self.references[handle] -= 1
        assert self.slots.release(handle) == self.references[handle]

    @precondition(lambda self: not all(self.references.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(h for h, n in self.references.items() if not n)))
        self.slots.free(handle)
        del self.references[handle]

    @precondition(lambda self: self.references)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.references)))
        self.slots.set_pinned(self.slots.resolve(handle).digest, pinned)

    @invariant()
    def is_whole(self) -> None:
        self.slots.check_integrity()
        assert {r.handle: r.references for r in self.slots.residents()} == self.references


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
