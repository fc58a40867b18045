"""The life of an adapter in the engine, from the first request that names its digest to the last that lets it go.

    require ──▶ ACQUIRING ──on_acquired──▶ PLACING ──room──▶ COPYING ──arrived──▶ READY ──begin_unload──▶ DRAINING
                    └── on_acquire_failed, no memory ──▶ FAILED (forgotten after a while)

While MAX_AHEAD others are ACQUIRING or PLACING, `require` starts nothing (WANTED), since what waits for room holds host
memory. READY ends silently when another adapter takes the room; DRAINING when the last reference goes, or in READY
again when nobody waits for that any more. The blob is held in the host arena from `on_acquired` until the copy has
arrived or is given up. Loads are independent: each waits for its own blob and its own room. This module is policy:
bytes are the arena's, blobs the adapter process's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from inference_service.lora.counters import LoadCounters, LoadPhase, PoolMemory
from inference_service.lora.slots import Evicted, Handle, Move, Placement, SlotTable
from inference_service.stats import LoadInFlight, Usage
from inference_service.types import Acquired, AcquireFailed, BlobLayout, ResidentAdapter
from shared.errors import AdapterMemory, LoraplexError, from_record

MAX_AHEAD = 32


class AdapterState(StrEnum):
    WANTED = "WANTED"
    ACQUIRING = "ACQUIRING"
    PLACING = "PLACING"
    COPYING = "COPYING"
    READY = "READY"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


class Wanted(NamedTuple):
    """An adapter that requests of `tenant` wait for."""

    digest: str
    tenant: str


class Copy(Protocol):
    """A copy under way."""

    bytes_left: int

    def is_done(self) -> bool:
        """Whether it has arrived; never waits."""
        ...


class SlotMemory(Protocol):
    """What the pool needs of `lora.arena.Arena`."""

    def load(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int], host_offset: int) -> Copy:
        """Start to copy a blob into a slot."""
        ...

    def clear(self, slot: int) -> None:
        """Make the kernels skip a slot."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Move bytes within the arena."""
        ...

    def relocate(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int]) -> None:
        """Make the kernels find a slot's chunks where they are now."""
        ...


@dataclass
class Adapter:
    """One digest that the pool knows.

    `is_unwanted`: unloaded before it was READY; it goes as soon as what is under way has ended.
    `layout`: of what is in its slot.
    `tried_at`: `SlotTable.changes` when it last found no room.
    `refused`: what did not fit when it FAILED for want of room.
    `tenant`: whose requests it is loaded for; "" is an operator.
    `is_ordered`: an operator asked for it; it is placed whether or not requests wait.
    `began`, `phase_began`: when its load, and the state it is in, began.
    """

    digest: str
    state: AdapterState
    blob: Acquired | None = None
    layout: BlobLayout | None = None
    handle: Handle | None = None
    copy: Copy | None = None
    error: LoraplexError | None = None
    forget_at: float = 0.0
    is_unwanted: bool = False
    tenant: str = ""
    is_ordered: bool = False
    tried_at: int = -1
    refused: BlobLayout | None = None
    began: float = 0.0
    phase_began: float = 0.0


class AdapterPool:
    """All adapters of one engine, by digest.

    Args:
        slots: Who may have which room.
        arena: Copies and clears.
        acquire_blob: Asks for a digest's blob in the host arena; answered by `on_acquired` or `on_acquire_failed`.
        release_blob: Gives such a blob back. Called once for every `on_acquired`.
        clock: Seconds, monotonic.
        failure_seconds: How long a failure is remembered, unless the error names a longer time; want of memory only
            as long as the error says.
    """

    def __init__(
        self,
        slots: SlotTable,
        arena: SlotMemory,
        acquire_blob: Callable[[str], None],
        release_blob: Callable[[str], None],
        clock: Callable[[], float],
        failure_seconds: float = 5.0,
    ) -> None:
        self._slots = slots
        self._arena = arena
        self._acquire_blob = acquire_blob
        self._release_blob = release_blob
        self._clock = clock
        self._failure_seconds = failure_seconds
        self.counters = LoadCounters()
        self._adapters: dict[str, Adapter] = {}
        self._pinned: set[str] = set()
        self._required: set[str] = set()  # since the last `poll`
        self._wanted: set[str] = set()  # between the two `poll` before
        self._evicted_in_need: set[str] = set()
        self._num_acquiring = 0
        # Those that `poll` moves on, in the order in which they came to wait.
        self._placing: list[Adapter] = []
        self._copying: list[Adapter] = []

    # ---- what requests ask for

    def require(self, digest: str, tenant: str = "") -> AdapterState:
        """Want an adapter: start its load if there is none, and keep it from being the next victim if it is there.
        A load is for `tenant`, whose adapters' bytes may be bounded.

        A failure is remembered for a few seconds, want of room only while there is none; then it tries again. What is
        wanted every step, as requests that wait do, is not evicted.
        """
        self._required.add(digest)
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.state is AdapterState.FAILED and self._may_try_again(adapter):
            adapter = None
        if adapter is None and self._num_acquiring + len(self._placing) >= MAX_AHEAD:
            self._adapters.pop(digest, None)
            return AdapterState.WANTED
        if adapter is None:
            now = self._clock()
            adapter = Adapter(digest, AdapterState.ACQUIRING, tenant=tenant, began=now, phase_began=now)
            self._adapters[digest] = adapter
            self._num_acquiring += 1
            self.counters.needless_reloads += digest in self._evicted_in_need
            self._evicted_in_need.discard(digest)
            self._acquire_blob(digest)
        adapter.is_unwanted = False
        if adapter.state is AdapterState.READY:
            self._slots.touch(digest)
        return adapter.state

    def want(self, line: Iterable[Wanted]) -> None:
        """`require` the first of `line`, as many as fit at once: none of them is evicted for another.

        `line` is read only as far as needed. If others hold the places of loads that it needs, and wait for room, they
        give these up.
        """
        room, slots = self._slots.room_unpinned()
        place: dict[str, int] = {}
        is_short = False
        of_tenant: dict[str, int] = {}
        for digest, tenant in line:
            nbytes = self._expected_bytes(self._adapters.get(digest))
            total = of_tenant.get(tenant, 0) + nbytes
            if digest in place or (of_tenant.get(tenant) and 0 < self._slots.owner_bytes < total):
                continue
            if digest not in self._pinned:
                room -= nbytes
                slots -= 1
            if place and (room < 0 or slots < 0):
                break
            place[digest] = len(place)
            of_tenant[tenant] = total
            is_short |= self.require(digest, tenant) is AdapterState.WANTED
        if is_short:
            for adapter in [a for a in self._placing if a.digest not in place and not a.is_ordered]:
                self.begin_unload(adapter.digest)
        self._placing.sort(key=lambda adapter: -1 if adapter.is_ordered else place.get(adapter.digest, len(place)))

    def state(self, digest: str) -> AdapterState | None:
        """Where an adapter is; None if the pool does not know it (any more)."""
        adapter = self._adapters.get(digest)
        return adapter.state if adapter else None

    def is_over_quota(self, digest: str) -> bool:
        """Whether an adapter that waits for room waits for others of its tenant to go."""
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.blob is None:
            return False
        return self._slots.excess(self._slots.bytes_for(adapter.blob.layout), adapter.tenant) > 0

    def is_pinned(self, digest: str) -> bool:
        """Whether it stays, once it is there."""
        return digest in self._pinned

    def error(self, digest: str) -> LoraplexError | None:
        """Why an adapter is FAILED, and after how many seconds it is worth asking again."""
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.error is None:
            return None
        if not isinstance(adapter.error, AdapterMemory):  # which says itself whether any retry helps
            adapter.error.retry_after = max(adapter.forget_at - self._clock(), 0.0)
        return adapter.error

    def acquire(self, digest: str) -> Handle:
        """A reference to a READY adapter; it stays until as many calls of `release`.

        Raises:
            KeyError: it is not READY.
        """
        if self.state(digest) is not AdapterState.READY:
            raise KeyError(digest)
        return self._slots.acquire(digest)

    def check(self, handle: Handle) -> None:
        """Whoever computes with a handle's slot calls this first.

        Raises:
            StaleHandle: the slot is no longer that adapter's.
        """
        self._slots.resolve(handle)

    def release(self, handle: Handle) -> None:
        """Give a reference back.

        Raises:
            StaleHandle: the slot is no longer that adapter's.
        """
        digest = self._slots.resolve(handle).digest
        remaining = self._slots.release(handle)
        adapter = self._adapters[digest]
        if not remaining and adapter.state is AdapterState.DRAINING:
            self._unload(adapter)

    # ---- what operators ask for

    def load(self, digest: str, pinned: bool) -> AdapterState:
        """Like `require`; with `pinned` also pin it. The pin belongs to the digest and outlives a failed load.

        It ends with `begin_unload` only: a load without a pin takes nobody else's away.
        """
        if pinned:
            self._pinned.add(digest)
        state = self.require(digest)
        if digest in self._adapters:
            self._adapters[digest].is_ordered = True
        if pinned and self._slots.find(digest) is not None:
            self._slots.set_pinned(digest, True)
        return state

    def begin_unload(self, digest: str) -> AdapterState | None:
        """Let an adapter go, pinned or not: no new references, and it is freed with the last one.

        Returns:
            Its state afterwards: None once it is gone. A load under way ends first, and is then dropped.
        """
        self._pinned.discard(digest)
        adapter = self._adapters.get(digest)
        if adapter is None:
            return None
        if self._slots.find(digest) is not None:
            self._slots.set_pinned(digest, False)
        if adapter.state is AdapterState.READY:
            adapter.state = AdapterState.DRAINING
            if not self._references(adapter):
                self._unload(adapter)
        elif adapter.state in (AdapterState.ACQUIRING, AdapterState.COPYING):
            adapter.is_unwanted = True
        elif adapter.state is AdapterState.PLACING:
            self._placing.remove(adapter)
            self._slots.give_up(digest)
            self._give_blob_back(adapter)
            del self._adapters[digest]
        elif adapter.state is AdapterState.FAILED:
            del self._adapters[digest]
        return self.state(digest)

    def cancel_unload(self, digest: str) -> None:
        """Nobody wants it unloaded any more: if it is still DRAINING, it is READY again, though not pinned."""
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.state is AdapterState.DRAINING:
            adapter.state = AdapterState.READY

    def residents(self) -> list[ResidentAdapter]:
        """Every adapter that steps can use, least recently used first. `active_requests`: its references."""
        return [
            ResidentAdapter(r.digest, r.nbytes, r.rank, r.pinned, r.references)
            for r in self._slots.residents()
            if self._adapters[r.digest].state is not AdapterState.COPYING
        ]

    def memory(self) -> PoolMemory:
        """How the arena and the slots are used."""
        slots, residents = self._slots, self._slots.residents()
        return PoolMemory(
            arena=Usage(slots.num_bytes - slots.free_bytes, slots.num_bytes),
            pinned_bytes=sum(resident.nbytes for resident in residents if resident.pinned),
            free_in_gaps=slots.free_bytes - slots.largest_gap,
            slots=Usage(len(residents), slots.num_slots),
        )

    def loads_in_flight(self) -> list[LoadInFlight]:
        """Loads that have not ended, in the order in which they began."""
        now = self._clock()
        states = (AdapterState.ACQUIRING, AdapterState.PLACING, AdapterState.COPYING)
        return [_in_flight(adapter, now) for adapter in self._adapters.values() if adapter.state in states]

    # ---- what the adapter process answers

    def on_acquired(self, message: Acquired) -> None:
        """The blob is in the host arena. A blob that nobody waits for goes straight back."""
        adapter = self._adapters.get(message.digest)
        if adapter is None or adapter.state is not AdapterState.ACQUIRING:
            self._release_blob(message.digest)
            return
        self._num_acquiring -= 1
        adapter.blob = message
        if adapter.is_unwanted:
            self._give_blob_back(adapter)
            del self._adapters[adapter.digest]
            return
        self._enter(adapter, AdapterState.PLACING, "acquire")
        self._placing.append(adapter)

    def on_acquire_failed(self, message: AcquireFailed) -> None:
        """There is no blob, and this is why. Where others' blobs only had no room to spare, it is asked for again."""
        adapter = self._adapters.get(message.digest)
        if adapter is None or adapter.state is not AdapterState.ACQUIRING:
            return
        self._num_acquiring -= 1
        error = from_record(message.error)
        if adapter.is_unwanted or _is_for_now(error):
            del self._adapters[adapter.digest]
            return
        self._fail(adapter, error)

    # ---- what the engine does every step

    def poll(self) -> None:
        """Give room to whoever waits for it, and take in the copies that have arrived. Cheap when nobody does.

        Room first: an adapter that arrives in this call cannot be evicted before the scheduler has seen it READY.
        Between two steps: all that the batch uses is referenced, and all that requests wait for has been required.
        """
        self._wanted, self._required = self._required, set()
        self._slots.set_wanted(self._wanted)
        for adapter in list(self._placing):
            if adapter.tried_at != self._slots.changes:
                self._try_to_place(adapter)
        for adapter in list(self._copying):
            if adapter.copy is not None and adapter.copy.is_done():
                self._arrive(adapter)

    @property
    def is_moving(self) -> bool:
        """Whether the next `poll` has bytes to move on, for a load or to make room."""
        return bool(self._copying) or self._slots.is_compacting

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and states agree. For tests and idle moments."""
        self._slots.check_integrity()
        in_slots = {resident.digest: resident.handle for resident in self._slots.residents()}
        with_handle = {a.digest: a.handle for a in self._adapters.values() if a.handle is not None}
        assert in_slots == with_handle, "slots and adapters disagree"
        for adapter in self._adapters.values():
            state = adapter.state
            has_slot = state in (AdapterState.COPYING, AdapterState.READY, AdapterState.DRAINING)
            assert (adapter.handle is not None) == has_slot, f"{state} and its slot"
            assert (adapter.blob is not None) == (state in (AdapterState.PLACING, AdapterState.COPYING)), (
                f"{state} blob"
            )
            assert (adapter.layout is not None) == has_slot, f"{state} and its layout"
            assert (adapter.error is not None) == (state is AdapterState.FAILED), f"{state} and its error"
            assert (adapter in self._placing) == (state is AdapterState.PLACING), f"{state} waits for room"
            assert (adapter in self._copying) == (state is AdapterState.COPYING), f"{state} is being copied"
        acquiring = [a for a in self._adapters.values() if a.state is AdapterState.ACQUIRING]
        assert len(acquiring) == self._num_acquiring, "adapters that are acquired are miscounted"

    # ---- transitions

    def _try_to_place(self, adapter: Adapter) -> None:
        blob = adapter.blob
        assert blob is not None
        try:
            room = self._slots.reserve(adapter.digest, blob.layout, adapter.digest in self._pinned, adapter.tenant)
        except LoraplexError as error:
            self._placing.remove(adapter)
            adapter.refused = blob.layout
            self._fail(adapter, error)
            return
        for evicted in room.evicted:
            self._evict(evicted)
        self._move(room.moves)
        if room.placement is not None:
            self._placing.remove(adapter)
            self._start_copy(adapter, blob, room.placement)
        elif not room.moves:
            adapter.tried_at = self._slots.changes

    def _evict(self, evicted: Evicted) -> None:
        self.counters.evictions[evicted.reason] += 1
        if evicted.digest in self._wanted:
            self._evicted_in_need.add(evicted.digest)
        self._arena.clear(evicted.handle.slot)
        del self._adapters[evicted.digest]

    def _move(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        self.counters.moves += len(moves)
        self.counters.moved_bytes += sum(move.nbytes for move in moves)
        self._arena.move(moves)
        for handle in dict.fromkeys(move.handle for move in moves):
            resident = self._slots.resolve(handle)
            layout = self._adapters[resident.digest].layout
            assert layout is not None
            self._arena.relocate(handle.slot, layout, [chunk.start for chunk in resident.ranges])

    def _start_copy(self, adapter: Adapter, blob: Acquired, placement: Placement) -> None:
        handle, offsets = placement
        try:
            adapter.copy = self._arena.load(handle.slot, blob.layout, offsets, blob.host_offset)
        except LoraplexError as error:
            self._slots.release(handle)
            self._slots.free(handle)
            self._fail(adapter, error)
            return
        adapter.handle, adapter.layout = handle, blob.layout
        self._enter(adapter, AdapterState.COPYING, "place")
        self._copying.append(adapter)

    def _arrive(self, adapter: Adapter) -> None:
        assert adapter.handle is not None
        self._copying.remove(adapter)
        adapter.copy = None
        self.counters.load_seconds["total"].add(self._clock() - adapter.began)
        self._enter(adapter, AdapterState.READY, "copy")
        self._give_blob_back(adapter)
        self._slots.arrived(adapter.handle)
        self._slots.touch(adapter.digest)
        self._slots.release(adapter.handle)
        if adapter.is_unwanted:
            self._unload(adapter)

    def _enter(self, adapter: Adapter, state: AdapterState, ended: LoadPhase) -> None:
        """The load goes on to `state`; the phase that ended is counted."""
        now = self._clock()
        self.counters.load_seconds[ended].add(now - adapter.phase_began)
        adapter.state, adapter.phase_began = state, now

    def _fail(self, adapter: Adapter, error: LoraplexError) -> None:
        now = self._clock()
        for digest in [a.digest for a in self._adapters.values() if a.error is not None and now >= a.forget_at]:
            del self._adapters[digest]
        self._give_blob_back(adapter)
        self.counters.failures[error.reason] += 1
        adapter.state = AdapterState.FAILED
        adapter.error = error
        at_least = 0.0 if _is_for_now(error) else self._failure_seconds
        adapter.forget_at = now + max(at_least, error.retry_after or 0.0)

    def _may_try_again(self, adapter: Adapter) -> bool:
        has_room = adapter.refused is not None and self._slots.can_hold(adapter.refused, adapter.tenant)
        return has_room or self._clock() >= adapter.forget_at

    def _unload(self, adapter: Adapter) -> None:
        self.counters.evictions["unload"] += 1
        self._free(adapter)

    def _free(self, adapter: Adapter) -> None:
        assert adapter.handle is not None
        self._arena.clear(adapter.handle.slot)
        self._slots.free(adapter.handle)
        del self._adapters[adapter.digest]

    def _expected_bytes(self, adapter: Adapter | None) -> int:
        """What an adapter takes of the arena; as much as others on average while nothing is known of it."""
        if adapter is not None and (layout := adapter.layout or (adapter.blob and adapter.blob.layout)):
            return self._slots.bytes_for(layout)
        return self._slots.mean_bytes

    def _give_blob_back(self, adapter: Adapter) -> None:
        if adapter.blob is not None:
            adapter.blob = None
            self._release_blob(adapter.digest)

    def _references(self, adapter: Adapter) -> int:
        resident = self._slots.find(adapter.digest)
        return resident.references if resident else 0


def _is_for_now(error: LoraplexError) -> bool:
    """Whether host memory is full of blobs in use, of which each goes soon."""
    return isinstance(error, AdapterMemory) and error.retry_after is not None


def _in_flight(adapter: Adapter, now: float) -> LoadInFlight:
    total = adapter.blob.layout.nbytes if adapter.blob else 0
    done = total - adapter.copy.bytes_left if adapter.copy else 0
    progress = done / total if adapter.copy and total else 0.0
    return LoadInFlight(adapter.digest, adapter.state.value, progress, now - adapter.began, done, total)
