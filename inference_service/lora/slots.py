"""Which adapter is in which slot, and where its bytes lie in the arena. Policy on Python ints; the arena copies.

A slot is a small integer that the kernels index. Bytes follow an adapter's true rank and targets: one chunk a layer,
each in any gap. The victim is the least recently used adapter that nobody references or waits for and that is not
pinned. Only bytes and slots cost a victim: where the bytes are free in pieces, chunks are moved, a bounded number of
bytes at a time.
"""

import heapq
from collections.abc import Set
from typing import Literal

from inference_service.lora.compaction import find_lack, plan_joining
from inference_service.lora.gaps import Range, coalesce, fit, round_up, without
from inference_service.lora.limits import SlotLimits
from inference_service.lora.residents import Evicted, Handle, Move, Placement, Resident, Room, StaleHandle, length
from inference_service.lora.victims import Shortage, choose_victims
from inference_service.types import BlobLayout, PinOwner
from shared.errors import AdapterMemory, TenantQuota


class SlotTable:
    """The slots and the arena's byte ranges.

    Args:
        num_slots: How many adapters can be resident at once.
        arena_bytes: Size of the arena; what is beyond the last whole unit stays unused.
        move_bytes: How many bytes one `reserve` may move; at least one chunk, whatever its size.
        owner_bytes: Of the adapters of one owner; 0 for all there are.
    """

    def __init__(
        self,
        num_slots: int,
        arena_bytes: int,
        move_bytes: int = 64 << 20,
        owner_bytes: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.arena_bytes = arena_bytes
        self.move_bytes = move_bytes
        self.owner_bytes = owner_bytes
        # Grows whenever the answer to a load that waits for room may have changed.
        self.changes = 0
        self._end = arena_bytes - arena_bytes % round_up(1)
        self._limits = SlotLimits(num_slots, self._end, owner_bytes)
        self._gaps = coalesce([Range(0, self._end)])
        self._residents: dict[str, Resident] = {}  # least recently used first
        self._by_slot: dict[int, Resident] = {}
        self._free_slots = list(range(num_slots))
        self._generations = [0] * num_slots
        self._wanted: Set[str] = frozenset()
        self._compacting_for: str | None = None  # has slot and bytes, though in pieces; nobody else may take them

    def reserve(self, digest: str, layout: BlobLayout, pinned_by: tuple[PinOwner, ...] = (), owner: str = "") -> Room:
        """A slot and bytes for an adapter, evicting and moving others where needed. What its owner has too much of
        goes first.

        Once placed, the caller holds one reference to it and calls `arrived` when its bytes are there. While chunks
        move for one adapter, others must wait, until it is placed or given up.

        Raises:
            AdapterMemory: it is larger than the arena, or pinned adapters leave too little room.
            TenantQuota: it is larger than its owner's adapters may be together.
        """
        if digest in self._residents:
            raise ValueError(f"{digest} is resident")
        sizes = _sizes(layout)
        try:
            self._check(sum(sizes), owner)
        except (AdapterMemory, TenantQuota):
            self.give_up(digest)
            raise
        if self._compacting_for not in (None, digest):
            return Room()
        evicted = self._evict_for(sum(sizes), owner)
        if evicted is None:
            return Room()
        moves = self._compact(sizes)
        found = fit(self._gaps, sizes)
        if found is None:
            self._compacting_for = digest
            return Room(evicted, moves)
        self.give_up(digest)
        offsets, self._gaps = found
        return Room(evicted, moves, self._place(digest, layout.rank, offsets, sizes, pinned_by, owner))

    def give_up(self, digest: str) -> None:
        """The adapter that room may have been made for is not to be placed."""
        if self._compacting_for == digest:
            self._compacting_for = None
            self.changes += 1

    def arrived(self, handle: Handle) -> None:
        """The adapter's bytes are in their place, and may be moved to another.

        Raises:
            StaleHandle: the slot is no longer this adapter's.
        """
        self.resolve(handle).is_arriving = False
        self.changes += self._compacting_for is not None

    def set_wanted(self, digests: Set[str]) -> None:
        """Those that requests wait for now: none of them is evicted."""
        self.changes += not self._residents.keys().isdisjoint(self._wanted - digests)
        self._wanted = digests

    def can_hold(self, layout: BlobLayout, owner: str = "") -> bool:
        """Whether `reserve` would place the adapter, at once or after waiting."""
        try:
            self._check(sum(_sizes(layout)), owner)
        except (AdapterMemory, TenantQuota):
            return False
        return True

    def acquire(self, digest: str) -> Handle:
        """One more reference to a resident adapter, which becomes the most recently used.

        Raises:
            KeyError: it is not resident.
        """
        resident = self._residents[digest]
        resident.references += 1
        self.touch(digest)
        return resident.handle

    def release(self, handle: Handle) -> int:
        """Give a reference back. Returns how many remain.

        Raises:
            StaleHandle: the slot is no longer this adapter's.
        """
        resident = self.resolve(handle)
        if not resident.references:
            raise ValueError(f"{resident.digest} has no reference to give back")
        resident.references -= 1
        self.changes += not resident.references
        return resident.references

    def touch(self, digest: str) -> None:
        """Make a resident adapter the most recently used."""
        self._residents[digest] = self._residents.pop(digest)

    def set_pins(self, digest: str, pinned_by: tuple[PinOwner, ...]) -> None:
        """Protect a resident adapter from eviction for these, or no longer."""
        self._residents[digest].pinned_by = pinned_by
        self.changes += 1

    def free(self, handle: Handle) -> None:
        """Give up a slot and its bytes, pinned or not.

        Raises:
            StaleHandle: the slot is no longer this adapter's.
            ValueError: somebody still references it.
        """
        resident = self.resolve(handle)
        if resident.references:
            raise ValueError(f"{resident.digest} is referenced")
        self._drop(resident)

    def find(self, digest: str) -> Resident | None:
        """The resident adapter, or None."""
        return self._residents.get(digest)

    def resolve(self, handle: Handle) -> Resident:
        """The adapter that this handle names.

        Raises:
            StaleHandle: the slot is no longer this adapter's.
        """
        resident = self._by_slot.get(handle.slot)
        if resident is None or resident.handle != handle:
            raise StaleHandle(f"slot {handle.slot}, generation {handle.generation}")
        return resident

    def residents(self) -> list[Resident]:
        """Every adapter in a slot, least recently used first."""
        return list(self._residents.values())

    def room_unpinned(self) -> tuple[int, int]:
        """Bytes and slots that pinned adapters leave."""
        pinned = [resident.nbytes for resident in self._residents.values() if resident.pinned]
        return self._end - sum(pinned), self.num_slots - len(pinned)

    def has_room(self, needed: int, num_slots: int, idle: Set[str]) -> bool:
        """Whether so many bytes and slots are free, or would be without what can be evicted now, or once residents in
        `idle` are not in use any more."""
        going = [r.nbytes for r in self._residents.values() if self._can_go(r) or (r.digest in idle and not r.pinned)]
        return self.free_bytes + sum(going) >= needed and len(self._free_slots) + len(going) >= num_slots

    def excess(self, needed: int, owner: str) -> int:
        """Bytes that an owner must give up before it may have `needed` more."""
        if not owner or not self.owner_bytes:
            return 0
        owned = sum(resident.nbytes for resident in self._residents.values() if resident.owner == owner)
        return max(owned + needed - self.owner_bytes, 0)

    def bytes_for(self, layout: BlobLayout) -> int:
        """Arena bytes that an adapter takes."""
        return sum(_sizes(layout))

    @property
    def mean_bytes(self) -> int:
        """Arena bytes of a resident adapter on average; 0 without any."""
        return (self._end - self.free_bytes) // max(len(self._residents), 1)

    @property
    def free_bytes(self) -> int:
        """Arena bytes that no adapter takes."""
        return length(self._gaps)

    @property
    def is_compacting(self) -> bool:
        """Whether chunks move until an adapter fits that is to be reserved again."""
        return self._compacting_for is not None

    @property
    def num_bytes(self) -> int:
        """Arena bytes that adapters can take."""
        return self._end

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest gap."""
        return max((gap.size for gap in self._gaps), default=0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless ranges and gaps tile the arena and every slot is free or used, once."""
        residents = self.residents()
        taken = [chunk for resident in residents for chunk in resident.ranges]
        assert coalesce([*taken, *self._gaps]) == coalesce([Range(0, self._end)]), "ranges and gaps do not tile"
        assert length(taken) + self.free_bytes == self._end, "ranges overlap"
        assert self._gaps == coalesce(self._gaps), "gaps are not coalesced"
        used = [resident.handle.slot for resident in residents]
        assert sorted(used + self._free_slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert {id(r) for r in self._by_slot.values()} == {id(r) for r in residents}, "slots and digests disagree"
        for resident in residents:
            assert resident.references >= 0, "negative references"
            assert resident.handle.generation == self._generations[resident.handle.slot], "a resident is stale"

    def _check(self, needed: int, owner: str) -> None:
        """Raise if `needed` bytes could not be had even with every unpinned adapter gone."""
        self._limits.check_possible(needed, [resident for resident in self._residents.values() if resident.pinned])
        self._limits.check_owner(needed, owner)

    def _evict_for(self, needed: int, owner: str) -> tuple[Evicted, ...] | None:
        """Evict until a slot and `needed` bytes are free; None, and nobody, if references are in the way."""
        excess = self.excess(needed, owner)
        reason: Literal["bytes", "slots"] = "bytes" if needed > self.free_bytes or excess > 0 else "slots"
        evictable = [resident for resident in self._residents.values() if self._can_go(resident)]
        num_slots = 0 if self._free_slots else 1
        victims = choose_victims(evictable, Shortage(needed - self.free_bytes, num_slots, owner, excess))
        if victims is None:
            return None
        for victim in victims:
            self._drop(victim)
        return tuple(Evicted(victim.digest, victim.handle, reason) for victim in victims)

    def _can_go(self, resident: Resident) -> bool:
        return resident.is_evictable and resident.digest not in self._wanted

    def _compact(self, sizes: list[int]) -> tuple[Move, ...]:
        """Moves after which `sizes` fit, or after which fewer are needed: those of about `move_bytes`."""
        moves: list[Move] = []
        left = self.move_bytes
        fixed = sorted(chunk for r in self._residents.values() if r.is_arriving for chunk in r.ranges)
        while left > 0 and fit(self._gaps, sizes) is None:
            joining = plan_joining(self._gaps, find_lack(self._gaps, sizes), fixed)
            if joining is None:
                break
            slid = self._slide(joining.region, left)
            moves += slid
            left -= sum(move.nbytes for move in slid)
        return tuple(moves)

    def _slide(self, region: Range, most: int) -> list[Move]:
        """Move chunks to the start of `region`, which joins its gaps; stops after about `most` bytes."""
        chunks = sorted(
            (chunk, resident.handle.slot, index)
            for resident in self._residents.values()
            for index, chunk in enumerate(resident.ranges)
            if region.start <= chunk.start < region.end
        )
        moves: list[Move] = []
        end = region.start
        for chunk, slot, index in chunks:
            if end - region.start >= most:
                break
            resident = self._by_slot[slot]
            moves.append(Move(resident.handle, chunk.start, end, chunk.size))
            ranges = list(resident.ranges)
            ranges[index] = Range(end, end + chunk.size)
            resident.ranges = tuple(ranges)
            end += chunk.size
        freed = coalesce([*self._gaps, *(Range(move.source, move.source + move.nbytes) for move in moves)])
        self._gaps = without(freed, [Range(move.target, move.target + move.nbytes) for move in moves])
        return moves

    def _place(
        self,
        digest: str,
        rank: int,
        offsets: tuple[int, ...],
        sizes: list[int],
        pinned_by: tuple[PinOwner, ...],
        owner: str,
    ) -> Placement:
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        handle = Handle(slot, self._generations[slot])
        ranges = tuple(Range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        self._residents[digest] = self._by_slot[slot] = Resident(digest, handle, ranges, rank, 1, pinned_by, owner)
        self.changes += bool(pinned_by)
        return Placement(handle, offsets)

    def _drop(self, resident: Resident) -> None:
        del self._residents[resident.digest], self._by_slot[resident.handle.slot]
        heapq.heappush(self._free_slots, resident.handle.slot)
        self._gaps = coalesce([*self._gaps, *resident.ranges])
        self.changes += 1


def _sizes(layout: BlobLayout) -> list[int]:
    return [round_up(chunk.nbytes) for chunk in layout.chunks]
