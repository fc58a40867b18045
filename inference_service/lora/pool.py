"""The life of an adapter in the engine, from the first request that names its digest to the last that lets it go.

    require ──▶ ACQUIRING ──on_acquired──▶ PLACING ──room──▶ COPYING ──arrived──▶ READY ──begin_unload──▶ DRAINING
                    └── on_acquire_failed, no memory ──▶ FAILED (forgotten after a while)

While MAX_AHEAD others are ACQUIRING or PLACING, `require` starts nothing (WANTED), since what waits for room holds host
memory. READY ends silently when another adapter takes the room; DRAINING when the last reference goes, or in READY
again when nobody waits for that any more. The blob is held in the host arena from `on_acquired` until the copy has
arrived or is given up. Loads are independent: each waits for its own blob and its own room. This module is policy:
bytes are the arena's, blobs the adapter process's.
"""

from collections.abc import Callable, Iterable, Set

from inference_service.lora.adapter import AdapterState, SlotMemory, Wanted
from inference_service.lora.counters import LoadCounters, PoolMemory
from inference_service.lora.pins import Pins
from inference_service.lora.placing import Placing
from inference_service.lora.residents import Handle
from inference_service.lora.slots import SlotTable
from inference_service.lora.table import AdapterTable, is_for_now
from inference_service.stats import LoadInFlight, Usage
from inference_service.types import Acquired, AcquireFailed, PinOwner, ResidentAdapter
from shared.errors import AdapterMemory, LoraplexError, from_record

MAX_AHEAD = 32


class AdapterPool:
    """All adapters of one engine, by digest.

    Args:
        slots: Who may have which room.
        arena: Copies and clears.
        acquire_blob: Asks for a digest's blob in the host arena; answered by `on_acquired` or `on_acquire_failed`.
        release_blob: Gives such a blob back. Called once for every `on_acquired`.
        clock: Seconds, monotonic.
        failure_seconds: How long a failure is remembered whose error does not name a time to try again.
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
        self._acquire_blob = acquire_blob
        self._release_blob = release_blob
        self._clock = clock
        self._table = AdapterTable(slots, arena, release_blob, clock, failure_seconds)
        self._adapters = self._table.by_digest
        self._pins = Pins()
        self._placing = Placing(self._table, self._pins, self)
        self._required: set[str] = set()  # since the last `poll`
        self._wanted: set[str] = set()  # between the two `poll` before
        self._evicted_in_need: set[str] = set()
        self._num_acquiring = 0

    @property
    def counters(self) -> LoadCounters:
        """Since the start."""
        return self._table.counters

    # ---- what requests ask for

    def require(self, digest: str, tenant: str = "", prepare_seconds: float = 0.0) -> AdapterState:
        """Want an adapter: start its load if there is none, and keep it from being the next victim if it is there.
        A load is for `tenant`, whose adapters' bytes may be bounded; `prepare_seconds` were spent on it before.

        A failure is remembered for a few seconds, want of room only while there is none; then it tries again. What is
        wanted every step, as requests that wait do, is not evicted.
        """
        self._required.add(digest)
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.state is AdapterState.FAILED and self._table.may_try_again(adapter):
            adapter = None
        if adapter is None and self._num_acquiring + len(self._placing.waiting) >= MAX_AHEAD:
            self._adapters.pop(digest, None)
            return AdapterState.WANTED
        if adapter is None:
            adapter = self._table.begin(digest, tenant, prepare_seconds)
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
        give these up. An overdue one gets room before those behind it, unless it is its tenant's that it lacks.
        """
        room, slots = self._slots.room_unpinned()
        place: dict[str, int] = {}
        is_short = False
        of_tenant: dict[str, int] = {}
        overdue: set[str] = set()
        for digest, tenant, prepare_seconds, is_overdue in line:
            nbytes = self._table.expected_bytes(digest)
            total = of_tenant.get(tenant, 0) + nbytes
            if digest in place or (of_tenant.get(tenant) and 0 < self._slots.owner_bytes < total):
                continue
            if digest not in self._pins:
                room -= nbytes
                slots -= 1
            if place and (room < 0 or slots < 0):
                break
            place[digest] = len(place)
            of_tenant[tenant] = total
            is_short |= self.require(digest, tenant, prepare_seconds) is AdapterState.WANTED
            if is_overdue and not self.is_over_quota(digest):
                overdue.add(digest)
        if is_short:
            for adapter in [a for a in self._placing.waiting if a.digest not in place and not a.is_ordered]:
                self.begin_unload(adapter.digest)
        for adapter in self._placing.waiting:
            adapter.is_overdue = adapter.digest in overdue
        self._placing.waiting.sort(key=lambda a: -1 if a.is_ordered else place.get(a.digest, len(place)))

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

    def would_fit(self, digests: Set[str], idle: Set[str]) -> bool:
        """Whether adapters that wait for room would find it, all together, once residents in `idle` are idle."""
        blobs = [self._adapters[digest].blob for digest in digests]
        needed = sum(self._slots.bytes_for(blob.layout) for blob in blobs if blob is not None)
        return self._slots.has_room(needed, len(blobs), idle)

    def is_pinned(self, digest: str) -> bool:
        """Whether it stays, once it is there."""
        return digest in self._pins

    def error(self, digest: str) -> LoraplexError | None:
        """Why an adapter is FAILED, and after how many seconds it is worth asking again, if ever."""
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.error is None:
            return None
        if not isinstance(adapter.error, AdapterMemory):  # room may come sooner
            adapter.error.stands_for(max(adapter.forget_at - self._clock(), 0.0))
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
            self._table.unload(adapter)

    # ---- what operators ask for

    def load(
        self, digest: str, pinned: bool, owner: PinOwner = "operator", prepare_seconds: float = 0.0
    ) -> AdapterState:
        """Like `require`; with `pinned` also pin it for `owner`. The pin belongs to the digest and outlives a failed
        load. A load without a pin takes nobody's away.
        """
        if pinned:
            self._pins.add(digest, owner)
        state = self.require(digest, prepare_seconds=prepare_seconds)
        if digest in self._adapters:
            self._adapters[digest].is_ordered = True
        if pinned and self._slots.find(digest) is not None:
            self._slots.set_pins(digest, self._pins.owners(digest))
        return state

    def keep_pins(self, owner: PinOwner, digests: Set[str]) -> None:
        """End the owner's pins but those of `digests`; what was pinned for nobody else may be evicted from now on."""
        for digest in self._pins.keep(owner, digests):
            if self._slots.find(digest) is not None:
                self._slots.set_pins(digest, self._pins.owners(digest))

    def begin_unload(self, digest: str) -> AdapterState | None:
        """Let an adapter go, pinned or not: no new references, and it is freed with the last one.

        Returns:
            Its state afterwards: None once it is gone. A load under way ends first, and is then dropped.
        """
        self._pins.end(digest)
        adapter = self._adapters.get(digest)
        if adapter is None:
            return None
        if self._slots.find(digest) is not None:
            self._slots.set_pins(digest, ())
        if adapter.state is AdapterState.READY:
            adapter.state = AdapterState.DRAINING
            if not self._references(digest):
                self._table.unload(adapter)
        elif adapter.state in (AdapterState.ACQUIRING, AdapterState.COPYING):
            adapter.is_unwanted = True
        elif adapter.state is AdapterState.PLACING:
            self._placing.give_up(adapter)
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
            ResidentAdapter(r.digest, r.nbytes, r.rank, r.pinned_by, r.references)
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
        return [adapter.load_in_flight(now) for adapter in self._adapters.values() if adapter.is_loading]

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
            self._table.give_blob_back(adapter)
            del self._adapters[adapter.digest]
            return
        self._placing.add(adapter)

    def on_acquire_failed(self, message: AcquireFailed) -> None:
        """There is no blob, and this is why. Where others' blobs only had no room to spare, it is asked for again."""
        adapter = self._adapters.get(message.digest)
        if adapter is None or adapter.state is not AdapterState.ACQUIRING:
            return
        self._num_acquiring -= 1
        error = from_record(message.error)
        if adapter.is_unwanted or is_for_now(error):
            del self._adapters[adapter.digest]
            return
        self._table.fail(adapter, error)

    # ---- what the engine does every step

    def poll(self) -> None:
        """Give room to whoever waits for it, and take in the copies that have arrived. Cheap when nobody does.

        Between two steps: all that the batch uses is referenced, and all that requests wait for has been required.
        """
        self._wanted, self._required = self._required, set()
        self._slots.set_wanted(self._wanted)
        self._placing.poll()

    @property
    def is_moving(self) -> bool:
        """Whether the next `poll` has bytes to move on, for a load or to make room."""
        return bool(self._placing.copying) or self._slots.is_compacting

    def evicted(self, digest: str) -> None:
        """An adapter makes room for another."""
        if digest in self._wanted:
            self._evicted_in_need.add(digest)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, states and pins agree. For tests and idle moments."""
        self._table.check_integrity()
        self._placing.check_integrity()
        for resident in self._slots.residents():
            assert resident.pinned_by == self._pins.owners(resident.digest), "a resident's pins are not its pins"
        acquiring = [a for a in self._adapters.values() if a.state is AdapterState.ACQUIRING]
        assert len(acquiring) == self._num_acquiring, "adapters that are acquired are miscounted"

    def _references(self, digest: str) -> int:
        resident = self._slots.find(digest)
        return resident.references if resident else 0
