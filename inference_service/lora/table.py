"""Every adapter that the slot pool knows, and the changes of state that all its parts make. Torch-free."""

from collections.abc import Callable, Sequence

from inference_service.lora.adapter import Adapter, AdapterState, SlotMemory
from inference_service.lora.counters import LoadCounters, LoadPhase
from inference_service.lora.residents import Evicted, Move
from inference_service.lora.slots import SlotTable
from shared.errors import AdapterMemory, LoraplexError


class AdapterTable:
    """Adapters by digest.

    Args:
        slots: Who may have which room.
        arena: Copies and clears.
        release_blob: Gives a blob in the host arena back.
        clock: Seconds, monotonic.
        failure_seconds: How long a failure is remembered whose error does not name a time to try again.
    """

    def __init__(
        self,
        slots: SlotTable,
        arena: SlotMemory,
        release_blob: Callable[[str], None],
        clock: Callable[[], float],
        failure_seconds: float,
    ) -> None:
        self.slots = slots
        self.arena = arena
        self.clock = clock
        self.counters = LoadCounters()
        self.by_digest: dict[str, Adapter] = {}
        self._release_blob = release_blob
        self._failure_seconds = failure_seconds

    def begin(self, digest: str, tenant: str, prepare_seconds: float) -> Adapter:
        """A load, on which `prepare_seconds` were spent elsewhere, goes on here: its blob is asked for."""
        now = self.clock()
        self.counters.load_seconds["prepare"].add(prepare_seconds)
        began = now - prepare_seconds
        adapter = Adapter(digest, AdapterState.ACQUIRING, tenant=tenant, began=began, phase_began=now)
        self.by_digest[digest] = adapter
        return adapter

    def enter(self, adapter: Adapter, state: AdapterState, ended: LoadPhase) -> None:
        """The load goes on to `state`; the phase that ended is counted."""
        now = self.clock()
        self.counters.load_seconds[ended].add(now - adapter.phase_began)
        adapter.state, adapter.phase_began = state, now

    def fail(self, adapter: Adapter, error: LoraplexError) -> None:
        """The load is over. Failures of long ago are forgotten."""
        now = self.clock()
        for digest in [a.digest for a in self.by_digest.values() if a.error is not None and now >= a.forget_at]:
            del self.by_digest[digest]
        self.give_blob_back(adapter)
        self.counters.failures[error.reason] += 1
        adapter.state = AdapterState.FAILED
        adapter.error = error
        adapter.forget_at = now + (self._failure_seconds if error.retry_after is None else error.retry_after)

    def may_try_again(self, adapter: Adapter) -> bool:
        """Whether a FAILED one could be loaded now."""
        has_room = adapter.refused is not None and self.slots.can_hold(adapter.refused, adapter.tenant)
        return has_room or self.clock() >= adapter.forget_at

    def unload(self, adapter: Adapter) -> None:
        """Free the slot of one that nobody references."""
        assert adapter.handle is not None
        self.counters.evictions["unload"] += 1
        self.arena.clear(adapter.handle.slot)
        self.slots.free(adapter.handle)
        del self.by_digest[adapter.digest]

    def evicted(self, evicted: Evicted) -> None:
        """Its slot was taken for another."""
        self.counters.evictions[evicted.reason] += 1
        self.arena.clear(evicted.handle.slot)
        del self.by_digest[evicted.digest]

    def move(self, moves: Sequence[Move]) -> None:
        """Move chunks in the arena, and tell the kernels where they are now."""
        if not moves:
            return
        self.counters.moves += len(moves)
        self.counters.moved_bytes += sum(move.nbytes for move in moves)
        self.arena.move(moves)
        for handle in dict.fromkeys(move.handle for move in moves):
            resident = self.slots.resolve(handle)
            layout = self.by_digest[resident.digest].layout
            assert layout is not None
            self.arena.relocate(handle.slot, layout, [chunk.start for chunk in resident.ranges])

    def give_blob_back(self, adapter: Adapter) -> None:
        """Its blob, if it holds one, may leave host memory."""
        if adapter.blob is not None:
            adapter.blob = None
            self._release_blob(adapter.digest)

    def expected_bytes(self, digest: str) -> int:
        """What an adapter takes of the arena; as much as others on average while nothing is known of it."""
        adapter = self.by_digest.get(digest)
        if adapter is not None and (layout := adapter.layout or (adapter.blob and adapter.blob.layout)):
            return self.slots.bytes_for(layout)
        return self.slots.mean_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and states agree."""
        self.slots.check_integrity()
        in_slots = {resident.digest: resident.handle for resident in self.slots.residents()}
        with_handle = {a.digest: a.handle for a in self.by_digest.values() if a.handle is not None}
        assert in_slots == with_handle, "slots and adapters disagree"
        for adapter in self.by_digest.values():
            state = adapter.state
            has_slot = state in (AdapterState.COPYING, AdapterState.READY, AdapterState.DRAINING)
            has_blob = state in (AdapterState.PLACING, AdapterState.COPYING)
            assert (adapter.handle is not None) == has_slot, f"{state} and its slot"
            assert (adapter.blob is not None) == has_blob, f"{state} and its blob"
            assert (adapter.layout is not None) == has_slot, f"{state} and its layout"
            assert (adapter.error is not None) == (state is AdapterState.FAILED), f"{state} and its error"


def is_for_now(error: LoraplexError) -> bool:
    """Whether host memory is full of blobs in use, of which each goes soon."""
    return isinstance(error, AdapterMemory) and error.retry_after is not None
