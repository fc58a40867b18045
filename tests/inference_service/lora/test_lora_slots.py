"""The slot table: any sequence of operations keeps it whole, and its answers are those of a plain model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_service.lora.gaps import UNIT, Range, coalesce, complement, fit, round_up
from inference_service.lora.residents import Handle, Room, StaleHandle
from inference_service.lora.slots import SlotTable
from inference_service.types import BlobLayout, ChunkLayout, PinOwner
from shared.errors import AdapterMemory

# (out, in) of q, v, k, o, gate, up, down of Llama 3.1 8B.
LLAMA_8B = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


def layout(*units: int, rank: int = 8) -> BlobLayout:
    """One chunk a layer, of so many units; a little under, since sizes are rounded up."""
    chunks, offset = [], 0
    for layer, size in enumerate(units):
        chunks.append(ChunkLayout(layer, offset, size * UNIT - 16, ()))
        offset += size * UNIT - 16
    return BlobLayout(offset, rank, "float32", tuple(chunks))


def table(units: int = 8, slots: int = 4) -> SlotTable:
    return SlotTable(slots, units * UNIT + 100)


BY_HAND: tuple[PinOwner, ...] = ("operator",)


def place(slots: SlotTable, digest: str, *units: int, pinned_by: tuple[PinOwner, ...] = ()) -> Handle:
    """Reserve, arrive, and let go of the reservation's reference."""
    placement = slots.reserve(digest, layout(*units), pinned_by).placement
    assert placement is not None
    slots.arrived(placement.handle)
    slots.release(placement.handle)
    return placement.handle


def test_an_adapter_alone_is_one_piece() -> None:
    slots = table()
    room = slots.reserve("a", layout(1, 2, 1))
    assert room == ((), (), ((0, 1), (0, UNIT, 3 * UNIT)))
    assert slots.free_bytes == 4 * UNIT
    slots.check_integrity()


def test_chunks_go_into_any_gap() -> None:
    slots = table(6)
    handles = [place(slots, name, 2) for name in "abc"]
    slots.acquire("b")
    slots.free(handles[0])
    slots.free(handles[2])
    room = slots.reserve("d", layout(1, 2, 1))
    assert room.placement is not None
    assert not room.evicted
    assert not room.moves
    assert sorted(room.placement.chunk_offsets) == [0, 4 * UNIT, 5 * UNIT]
    slots.check_integrity()


def test_the_least_recently_used_makes_room() -> None:
    slots = table(3)
    for name in "abc":
        place(slots, name, 1)
    slots.touch("a")
    room = slots.reserve("d", layout(1))
    assert room.placement is not None
    assert [(evicted.digest, evicted.reason) for evicted in room.evicted] == [("b", "bytes")]
    assert room.placement.handle == Handle(1, 2)


def test_the_first_of_several_victims_is_spared_if_the_last_one_is_large_enough() -> None:
    slots = table(8)
    place(slots, "small", 1)
    place(slots, "large", 7)
    room = slots.reserve("c", layout(6))
    assert room.placement is not None
    assert [evicted.digest for evicted in room.evicted] == ["large"]
    assert slots.find("small") is not None


def test_what_requests_wait_for_is_no_victim() -> None:
    slots = table(3)
    for name in "abc":
        place(slots, name, 1)
    slots.set_wanted({"a", "b", "c"})
    changes = slots.changes
    assert slots.reserve("d", layout(1)) == ((), (), None)
    slots.set_wanted({"a", "b", "c", "e"})
    assert slots.changes == changes
    slots.set_wanted({"a", "c"})
    assert slots.changes > changes
    assert [evicted.digest for evicted in slots.reserve("d", layout(1)).evicted] == ["b"]


def test_a_slot_is_needed_as_well_as_bytes() -> None:
    slots = table(8, slots=1)
    place(slots, "a", 1)
    room = slots.reserve("b", layout(1))
    assert room.placement is not None
    assert (room.evicted[0].digest, room.evicted[0].reason) == ("a", "slots")


def test_free_bytes_in_no_gap_cost_moves_and_no_victim() -> None:
    slots = table(4)
    handles = [place(slots, name, 1) for name in "abcd"]
    slots.acquire("b")
    slots.set_pins("d", BY_HAND)
    slots.free(handles[0])
    slots.free(handles[2])
    room = slots.reserve("e", layout(2))
    assert room.placement is not None
    assert room.evicted == ()
    assert room.moves == ((handles[1], UNIT, 0, UNIT),)
    assert room.placement.chunk_offsets == (UNIT,)
    slots.check_integrity()


def test_moves_are_bounded_and_nobody_else_takes_the_room_meanwhile() -> None:
    slots = SlotTable(8, 8 * UNIT, move_bytes=UNIT)
    handles = [place(slots, name, 1) for name in "abcdefgh"]
    for handle in handles[::2]:
        slots.free(handle)
    rooms = [slots.reserve("big", layout(4))]
    while rooms[-1].placement is None:
        assert slots.is_compacting
        assert slots.reserve("small", layout(1)) == ((), (), None)
        rooms.append(slots.reserve("big", layout(4)))
    assert [len(room.moves) for room in rooms] == [1, 1, 1]
    assert not slots.is_compacting
    assert slots.find("small") is None
    slots.check_integrity()


def test_room_that_was_being_made_can_be_given_up() -> None:
    slots = SlotTable(8, 8 * UNIT, move_bytes=UNIT)
    handles = [place(slots, name, 1) for name in "abcdefgh"]
    for handle in handles[::2]:
        slots.free(handle)
    assert slots.reserve("big", layout(4)).placement is None
    changes = slots.changes
    slots.give_up("big")
    assert slots.changes > changes
    assert slots.reserve("small", layout(1)).placement is not None


def test_bytes_on_their_way_are_not_moved() -> None:
    slots = table(4)
    a = place(slots, "a", 1)
    arriving = slots.reserve("b", layout(1)).placement
    c = place(slots, "c", 1)
    assert arriving is not None
    slots.free(a)
    slots.free(c)
    assert slots.reserve("d", layout(3)) == ((), (), None)
    assert slots.is_compacting
    changes = slots.changes
    slots.arrived(arriving.handle)
    assert slots.changes > changes
    assert slots.reserve("d", layout(3)).moves == ((arriving.handle, UNIT, 0, UNIT),)


def test_references_make_it_wait_and_evict_nobody() -> None:
    slots = table(4)
    a = place(slots, "a", 2)
    place(slots, "b", 2)
    slots.acquire("a")
    changes = slots.changes
    assert slots.reserve("c", layout(4)) == ((), (), None)
    assert [resident.digest for resident in slots.residents()] == ["b", "a"]
    assert slots.changes == changes
    assert slots.release(a) == 0
    assert slots.changes > changes
    assert slots.reserve("c", layout(4)).placement is not None


def test_larger_than_the_arena() -> None:
    with pytest.raises(AdapterMemory, match=r"2304 bytes .* has 2048; enlarge it with --adapter-memory") as caught:
        table().reserve("a", layout(9))
    assert caught.value.retry_after is None
    assert caught.value.metadata == {"bytes_needed": "2304", "arena_bytes": "2048"}


def test_pins_in_the_way() -> None:
    slots = table(4)
    place(slots, "a", 3, pinned_by=BY_HAND)
    with pytest.raises(AdapterMemory, match="pinned adapters leave no room for 512 bytes") as caught:
        slots.reserve("b", layout(2))
    assert caught.value.metadata == {"bytes_needed": "512", "arena_bytes": "1024", "pinned_by": "operator"}
    assert not slots.can_hold(layout(2))
    assert slots.can_hold(layout(1))
    slots.set_pins("a", ())
    assert slots.can_hold(layout(2))
    assert slots.reserve("b", layout(2)).placement is not None


def test_pins_take_all_slots() -> None:
    slots = table(8, slots=1)
    place(slots, "a", 1, pinned_by=BY_HAND)
    with pytest.raises(AdapterMemory, match=r"pinned adapters take all 1 slots; .* --max-adapters") as caught:
        slots.reserve("b", layout(1))
    assert caught.value.metadata == {"slots": "1", "pinned_by": "operator"}


@pytest.mark.parametrize("num_slots", [2, 4], ids=["slots", "bytes"])
@pytest.mark.parametrize(
    ("pins", "named"),
    [
        ([BY_HAND, BY_HAND], {"operator": "adapter unload NAME"}),
        ([("registry",), ("registry",)], {"residency": "adapter update NAME --residency on-demand"}),
        (
            [("operator", "registry"), BY_HAND],
            {"operator": "adapter unload NAME", "residency": "adapter update NAME --residency on-demand"},
        ),
    ],
)
def test_the_advice_is_for_those_whose_pins_are_in_the_way(
    num_slots: int, pins: list[tuple[PinOwner, ...]], named: dict[str, str]
) -> None:
    slots = table(4, slots=num_slots)
    for name, pinned_by in zip("ab", pins, strict=True):
        place(slots, name, 2, pinned_by=pinned_by)
    with pytest.raises(AdapterMemory) as caught:
        slots.reserve("c", layout(1))
    assert caught.value.metadata["pinned_by"] == ",".join(named)
    for owner, advice in {"operator": "adapter unload", "residency": "adapter update"}.items():
        assert (advice in caught.value.message) == (owner in named)
    assert all(advice in caught.value.message for advice in named.values())
    assert caught.value.retry_after == 5.0


def test_pinned_adapters_in_the_way_are_moved() -> None:
    slots = table(4)
    handles = [place(slots, name, 1, pinned_by=BY_HAND if name == "b" else ()) for name in "abc"]
    slots.free(handles[0])
    slots.free(handles[2])
    assert slots.can_hold(layout(3))
    assert slots.reserve("d", layout(3)).moves == ((handles[1], UNIT, 0, UNIT),)


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
    assert slots.reserve("empty", layout()).placement == ((1, 1), ())
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


class Cells:
    """What lies in each unit of the arena: (digest, chunk, unit of the chunk)."""

    def __init__(self, units: int) -> None:
        self.content: list[object] = [None] * units

    def apply(self, room: Room, digest: str, sizes: list[int]) -> None:
        """Moves as an arena makes them, then the new adapter's bytes."""
        for _, source, target, nbytes in room.moves:
            assert target < source
            begin, end = source // UNIT, (source + nbytes) // UNIT
            self.content[target // UNIT : (target + nbytes) // UNIT] = self.content[begin:end]
        if room.placement is not None:
            for index, (offset, size) in enumerate(zip(room.placement.chunk_offsets, sizes, strict=True)):
                self.content[offset // UNIT : offset // UNIT + size] = [(digest, index, unit) for unit in range(size)]

    def check(self, slots: SlotTable) -> None:
        for resident in slots.residents():
            for index, chunk in enumerate(resident.ranges):
                found = self.content[chunk.start // UNIT : chunk.end // UNIT]
                assert found == [(resident.digest, index, unit) for unit in range(chunk.size // UNIT)]


class SlotMachine(RuleBasedStateMachine):
    """Random loads, references, pins, frees and moves over an arena of 12 units and 4 slots."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotTable(4, 12 * UNIT + 100, move_bytes=2 * UNIT)
        self.cells = Cells(12)
        self.references: dict[Handle, int] = {}
        self.count = 0
        self.waiting: tuple[str, list[int], bool] | None = None  # for whom room is being made

    @rule(sizes=st.lists(st.integers(1, 5), max_size=4), pinned=st.integers(0, 9))
    def reserve(self, sizes: list[int], pinned: int) -> None:
        self.count += 1
        self.attempt(str(self.count), sizes, pinned == 0)

    @precondition(lambda self: self.waiting)
    @rule()
    def reserve_again(self) -> None:
        assert self.waiting is not None
        self.attempt(*self.waiting)

    @precondition(lambda self: self.waiting)
    @rule()
    def give_up(self) -> None:
        assert self.waiting is not None
        self.slots.give_up(self.waiting[0])
        self.waiting = None

    def attempt(self, digest: str, sizes: list[int], pinned: bool) -> None:
        before = {r.digest: r for r in self.slots.residents()}
        free, slot_is_free = self.slots.free_bytes, len(before) < 4
        is_first = self.waiting is None or self.waiting[0] == digest
        needed = sum(sizes) * UNIT
        has_room = self.slots.has_room(needed, 1, set())
        has_room_once_idle = self.slots.has_room(needed, 1, before.keys())
        try:
            room = self.slots.reserve(digest, layout(*sizes), BY_HAND if pinned else ())
        except AdapterMemory:
            assert list(before) == [r.digest for r in self.slots.residents()]
            assert sum(sizes) > 12 or any(r.pinned for r in before.values())
            self.waiting = None if is_first else self.waiting
            return
        assert has_room_once_idle
        self.cells.apply(room, digest, sizes)
        if not is_first:
            assert room == ((), (), None)
            return
        assert has_room == (room.placement is not None or self.slots.is_compacting)
        gone = [before[evicted.digest] for evicted in room.evicted]
        assert not any(victim.references or victim.pinned for victim in gone)
        for victim in gone:  # none is evicted that need not be
            rest = sum(other.nbytes for other in gone if other is not victim)
            assert free + rest < sum(sizes) * UNIT or (len(gone) == 1 and not slot_is_free)
            del self.references[victim.handle]
        if room.placement is not None:
            self.references[room.placement.handle] = 1
        elif not self.slots.is_compacting:
            assert any(r.references for r in before.values())
        self.waiting = (digest, sizes, pinned) if self.slots.is_compacting else None

    @precondition(lambda self: any(r.is_arriving for r in self.slots.residents()))
    @rule()
    def arrive(self) -> None:
        self.slots.arrived(next(r.handle for r in self.slots.residents() if r.is_arriving))

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
        self.slots.set_pins(self.slots.resolve(handle).digest, BY_HAND if pinned else ())

    @invariant()
    def is_whole(self) -> None:
        self.slots.check_integrity()
        self.cells.check(self.slots)
        assert {r.handle: r.references for r in self.slots.residents()} == self.references


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans()), min_size=4, max_size=12),
    st.lists(st.integers(0, 11), max_size=6),
    st.integers(1, 16).flatmap(lambda total: st.lists(st.integers(1, 6), min_size=1, max_size=total)),
)
def test_what_fits_in_bytes_is_placed_in_a_few_steps_and_evicts_nobody(
    loads: list[tuple[list[int], bool]], frees: list[int], wanted: list[int]
) -> None:
    """Everything is in use, half of it pinned, and free bytes lie in pieces."""
    slots, cells = SlotTable(32, 32 * UNIT, move_bytes=3 * UNIT), Cells(32)
    for index, (sizes, pinned) in enumerate(loads):
        if sum(sizes) * UNIT <= slots.free_bytes:
            cells.apply(slots.reserve(str(index), layout(*sizes), BY_HAND if pinned else ()), str(index), sizes)
            slots.arrived(slots.residents()[-1].handle)
    for index in frees:
        resident = slots.find(str(index))
        if resident is not None:
            slots.release(resident.handle)
            slots.free(resident.handle)
    if sum(wanted) * UNIT > slots.free_bytes:
        return
    num_chunks = sum(len(resident.ranges) for resident in slots.residents())
    for _ in range(1 + num_chunks):
        room = slots.reserve("new", layout(*wanted))
        cells.apply(room, "new", wanted)
        assert not room.evicted
        assert sum(move.nbytes for move in room.moves[:-1]) < 3 * UNIT
        cells.check(slots)
        slots.check_integrity()
        if room.placement is not None:
            return
        assert room.moves
    raise AssertionError("it was not placed")


def test_mixed_ranks_take_their_bytes_and_no_more() -> None:
    """Adapters on all linears of an 8B model, of ranks 8, 16 and 64, until a gigabyte is full, and then for long."""
    chunks = {rank: [round_up(rank * 2 * sum(o + i for o, i in LLAMA_8B))] * 32 for rank in (8, 16, 64)}
    chosen = random.Random(3)
    slots = SlotTable(128, 1 << 30)
    for count in range(400):
        rank = chosen.choice((8, 16, 64))
        sizes = [size // UNIT for size in chunks[rank]]
        before = slots.free_bytes
        room = slots.reserve(str(count), layout(*sizes, rank=rank))
        while room.placement is None:
            assert room.moves
            room = slots.reserve(str(count), layout(*sizes, rank=rank))
        slots.arrived(room.placement.handle)
        slots.release(room.placement.handle)
        assert not room.evicted or before < sum(chunks[rank])
        slots.touch(chosen.choice(slots.residents()).digest)
    residents = slots.residents()
    true_bytes = sum(r.rank * 2 * 32 * sum(o + i for o, i in LLAMA_8B) for r in residents)
    assert true_bytes == sum(r.nbytes for r in residents)
    slots.check_integrity()


def test_adapters_resident_in_a_gigabyte_are_those_whose_bytes_fit() -> None:
    """Filled without evictions: what is left over is less than 5 % of what is taken, although gaps lie everywhere."""
    chosen = random.Random(4)
    slots = SlotTable(512, 1 << 30)
    kept: list[Handle] = []
    for count in range(2000):
        rank, on_all = chosen.choice((8, 16, 64)), chosen.random() < 0.5
        units = round_up(rank * 2 * sum(o + i for o, i in (LLAMA_8B if on_all else LLAMA_8B[:2]))) // UNIT
        if 32 * units * UNIT > slots.free_bytes:
            if slots.free_bytes < 0.05 * slots.num_bytes and count > 500:
                break
            slots.free(kept.pop(chosen.randrange(len(kept))))
            continue
        kept.append(place_in_steps(slots, str(count), layout(*[units] * 32, rank=rank)))
    assert slots.num_bytes - slots.free_bytes > 0.95 * slots.num_bytes
    slots.check_integrity()


def place_in_steps(slots: SlotTable, digest: str, wanted: BlobLayout) -> Handle:
    """As `place`; bytes are free."""
    for _ in range(40):
        room = slots.reserve(digest, wanted)
        assert not room.evicted
        if room.placement is not None:
            slots.arrived(room.placement.handle)
            slots.release(room.placement.handle)
            return room.placement.handle
    raise AssertionError("it was not placed")
