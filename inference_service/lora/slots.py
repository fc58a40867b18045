"""Which adapter is in which slot, and where its bytes lie in the arena. Policy on Python ints; the arena copies.

A slot is a small integer that the kernels index. Bytes follow an adapter's true rank and targets: one chunk a layer,
each in any gap. The victim is the least recently used adapter that nobody references and that is not pinned.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from inference_service.lora.gaps import Range, coalesce, complement, fit, round_up
from inference_service.types import BlobLayout
from shared.errors import AdapterMemory


class Handle(NamedTuple):
    """A slot, and the how-manieth use of it. A handle of an earlier use is stale."""

    slot: int
    generation: int


class Evicted(NamedTuple):
    """An adapter that made room."""

    digest: str
    handle: Handle


class Placement(NamedTuple):
    """Where an adapter goes: its slot, the arena offset of each of its chunks, and who made room."""

    handle: Handle
    chunk_offsets: tuple[int, ...]
    evicted: tuple[Evicted, ...]


class StaleHandle(LookupError):
    """The slot has been given to another adapter, or freed, since this handle was made."""


@dataclass
class Resident:
    """One adapter in a slot. `ranges`: its chunks in the arena. `references`: whoever may not lose it."""

    digest: str
    handle: Handle
    ranges: tuple[Range, ...]
    rank: int
    references: int
    pinned: bool

    @property
    def nbytes(self) -> int:
        """Arena bytes it takes."""
        return _length(self.ranges)

    @property
    def is_evictable(self) -> bool:
        """Whether it may make room."""
        return not self.references and not self.pinned


class SlotTable:
    """The slots and the arena's byte ranges.

    Args:
        num_slots: How many adapters can be resident at once.
        arena_bytes: Size of the arena; what is beyond the last whole unit stays unused.
        retry_after: Seconds that `AdapterMemory` tells the caller to wait when pins are in the way.
    """

    def __init__(self, num_slots: int, arena_bytes: int, retry_after: float = 5.0) -> None:
        self.num_slots = num_slots
        self.arena_bytes = arena_bytes
        self.retry_after = retry_after
        # Grows whenever the answer to a load that waits for room may have changed.
        self.changes = 0
        self._end = arena_bytes - arena_bytes % round_up(1)
        self._gaps = coalesce([Range(0, self._end)])
        self._residents: dict[str, Resident] = {}  # least recently used first
        self._by_slot: dict[int, Resident] = {}
        self._free_slots = list(range(num_slots))
        self._generations = [0] * num_slots

    def reserve(self, digest: str, layout: BlobLayout, pinned: bool = False) -> Placement | None:
        """A slot and bytes for an adapter, evicting others where needed; the caller holds one reference to it.

        Returns:
            The placement, or None when it must wait for references to drop. None evicts nobody.

        Raises:
            AdapterMemory: it is larger than the arena (no retry helps), or pinned adapters leave too little room.
        """
        if digest in self._residents:
            raise ValueError(f"{digest} is resident")
        sizes = [round_up(chunk.nbytes) for chunk in layout.chunks]
        self._check_possible(sizes)
        evicted = self._make_room(sizes)
        if evicted is None:
            return None
        return self._place(digest, layout.rank, sizes, pinned, evicted)

    def can_hold(self, layout: BlobLayout) -> bool:
        """Whether `reserve` would place the adapter, at once or after waiting."""
        try:
            self._check_possible([round_up(chunk.nbytes) for chunk in layout.chunks])
        except AdapterMemory:
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

    def set_pinned(self, digest: str, pinned: bool) -> None:
        """Protect a resident adapter from eviction, or no longer."""
        self._residents[digest].pinned = pinned
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

    @property
    def free_bytes(self) -> int:
        """Arena bytes that no adapter takes."""
        return _length(self._gaps)

    def check_integrity(self) -> None:
        """Raise AssertionError unless ranges and gaps tile the arena and every slot is free or used, once."""
        residents = self.residents()
        taken = [chunk for resident in residents for chunk in resident.ranges]
        assert coalesce([*taken, *self._gaps]) == coalesce([Range(0, self._end)]), "ranges and gaps do not tile"
        assert _length(taken) + self.free_bytes == self._end, "ranges overlap"
        assert self._gaps == coalesce(self._gaps), "gaps are not coalesced"
        used = [resident.handle.slot for resident in residents]
        assert sorted(used + self._free_slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert {id(r) for r in self._by_slot.values()} == {id(r) for r in residents}, "slots and digests disagree"
        for resident in residents:
            assert resident.references >= 0, "negative references"
            assert resident.handle.generation == self._generations[resident.handle.slot], "a resident is stale"

    def _check_possible(self, sizes: list[int]) -> None:
        """Raise if the adapter could not be placed even with every unpinned adapter gone."""
        needed = sum(sizes)
        facts = {"bytes_needed": str(needed), "arena_bytes": str(self._end)}
        if needed > self._end:
            raise AdapterMemory(
                f"the adapter takes {needed} bytes of device memory and the adapter arena has {self._end}; "
                "enlarge it with --adapter-memory",
                metadata=facts,
            )
        pinned = [resident for resident in self._residents.values() if resident.pinned]
        left = complement((chunk for resident in pinned for chunk in resident.ranges), self._end)
        if len(pinned) == self.num_slots or fit(left, sizes) is None:
            raise AdapterMemory(
                f"pinned adapters leave no room for {needed} bytes in the adapter arena of {self._end}; "
                "unload one, or enlarge the arena with --adapter-memory",
                metadata=facts,
                retry_after=self.retry_after,
            )

    def _make_room(self, sizes: list[int]) -> list[Resident] | None:
        """The fewest least recently used adapters after whose eviction there are a slot and gaps, or None.

        Bytes may be free and no gap fit; then more go than bytes alone ask for. Moving chunks within the arena
        instead belongs here: it would return moves beside the evicted.
        """
        gaps, slots, evicted = self._gaps, len(self._free_slots), list[Resident]()
        victims = (resident for resident in self._residents.values() if resident.is_evictable)
        while not slots or fit(gaps, sizes) is None:
            victim = next(victims, None)
            if victim is None:
                return None
            evicted.append(victim)
            gaps = coalesce([*gaps, *victim.ranges])
            slots += 1
        return evicted

    def _place(self, digest: str, rank: int, sizes: list[int], pinned: bool, evicted: Iterable[Resident]) -> Placement:
        gone = [Evicted(resident.digest, resident.handle) for resident in evicted]
        for digest_, _ in gone:
            self._drop(self._residents[digest_])
        found = fit(self._gaps, sizes)
        assert found is not None
        offsets, self._gaps = found
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        handle = Handle(slot, self._generations[slot])
        ranges = tuple(Range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        self._residents[digest] = self._by_slot[slot] = Resident(digest, handle, ranges, rank, 1, pinned)
        self.changes += pinned
        return Placement(handle, offsets, tuple(gone))

    def _drop(self, resident: Resident) -> None:
        del self._residents[resident.digest], self._by_slot[resident.handle.slot]
        heapq.heappush(self._free_slots, resident.handle.slot)
        self._gaps = coalesce([*self._gaps, *resident.ranges])
        self.changes += 1


def _length(ranges: Iterable[Range]) -> int:
    return sum(taken.size for taken in ranges)
