"""The life of an adapter in the engine, from the first request that names its digest to the last that lets it go.

    require ──▶ ACQUIRING ──on_acquired──▶ PLACING ──room──▶ COPYING ──arrived──▶ READY ──begin_unload──▶ DRAINING
                    └── on_acquire_failed, no memory ──▶ FAILED (forgotten after a while)

READY ends silently when another adapter takes the room; DRAINING when the last reference goes, or in READY again when
nobody waits for that any more. The blob is held in the host arena from `on_acquired` until the copy has arrived or is
given up. Loads are independent: each waits for its own blob and its own room. This module is policy: bytes are the
arena's, blobs the adapter process's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from inference_service.lora.slots import Handle, SlotTable
from inference_service.types import Acquired, AcquireFailed, BlobLayout, ResidentAdapter
from shared.errors import AdapterMemory, LoraplexError, from_record


class AdapterState(StrEnum):
    ACQUIRING = "ACQUIRING"
    PLACING = "PLACING"
    COPYING = "COPYING"
    READY = "READY"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


class Copy(Protocol):
    """A copy under way."""

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


@dataclass
class Adapter:
    """One digest that the pool knows.

    `is_unwanted`: unloaded before it was READY; it goes as soon as what is under way has ended.
    `tried_at`: `SlotTable.changes` when it last found no room.
    `refused`: what did not fit when it FAILED for want of room.
    """

    digest: str
    state: AdapterState
    blob: Acquired | None = None
    handle: Handle | None = None
    copy: Copy | None = None
    error: LoraplexError | None = None
    forget_at: float = 0.0
    is_unwanted: bool = False
    tried_at: int = -1
    refused: BlobLayout | None = None


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
        self._adapters: dict[str, Adapter] = {}
        self._pinned: set[str] = set()
        # Those that `poll` moves on, in the order in which they came to wait.
        self._placing: list[Adapter] = []
        self._copying: list[Adapter] = []

    # ---- what requests ask for

    def require(self, digest: str) -> AdapterState:
        """Want an adapter: start its load if there is none, and keep it from being the next victim if it is there.

        A failure is remembered for a few seconds, want of room only while there is none; then it tries again.
        """
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.state is AdapterState.FAILED and self._may_try_again(adapter):
            adapter = None
        if adapter is None:
            adapter = self._adapters[digest] = Adapter(digest, AdapterState.ACQUIRING)
            self._acquire_blob(digest)
        adapter.is_unwanted = False
        if adapter.state is AdapterState.READY:
            self._slots.touch(digest)
        return adapter.state

    def state(self, digest: str) -> AdapterState | None:
        """Where an adapter is; None if the pool does not know it (any more)."""
        adapter = self._adapters.get(digest)
        return adapter.state if adapter else None

    def error(self, digest: str) -> LoraplexError | None:
        """Why an adapter is FAILED."""
        adapter = self._adapters.get(digest)
        return adapter.error if adapter else None

    def acquire(self, digest: str) -> Handle:
        """A reference to a READY adapter; it stays until as many calls of `release`.

        Raises:
            KeyError: it is not READY.
        """
        if self.state(digest) is not AdapterState.READY:
            raise KeyError(digest)
        return self._slots.acquire(digest)

    def release(self, handle: Handle) -> None:
        """Give a reference back.

        Raises:
            StaleHandle: the slot is no longer that adapter's.
        """
        digest = self._slots.resolve(handle).digest
        remaining = self._slots.release(handle)
        adapter = self._adapters[digest]
        if not remaining and adapter.state is AdapterState.DRAINING:
            self._free(adapter)

    # ---- what operators ask for

    def load(self, digest: str, pinned: bool) -> AdapterState:
        """Like `require`; with `pinned` also pin it. The pin belongs to the digest and outlives a failed load.

        It ends with `begin_unload` only: a load without a pin takes nobody else's away.
        """
        if pinned:
            self._pinned.add(digest)
        state = self.require(digest)
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
                self._free(adapter)
        elif adapter.state in (AdapterState.ACQUIRING, AdapterState.COPYING):
            adapter.is_unwanted = True
        elif adapter.state is AdapterState.PLACING:
            self._placing.remove(adapter)
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

    # ---- what the adapter process answers

    def on_acquired(self, message: Acquired) -> None:
        """The blob is in the host arena. A blob that nobody waits for goes straight back."""
        adapter = self._adapters.get(message.digest)
        if adapter is None or adapter.state is not AdapterState.ACQUIRING:
            self._release_blob(message.digest)
            return
        adapter.blob = message
        if adapter.is_unwanted:
            self._give_blob_back(adapter)
            del self._adapters[adapter.digest]
            return
        adapter.state = AdapterState.PLACING
        self._placing.append(adapter)

    def on_acquire_failed(self, message: AcquireFailed) -> None:
        """There is no blob, and this is why."""
        adapter = self._adapters.get(message.digest)
        if adapter is None or adapter.state is not AdapterState.ACQUIRING:
            return
        if adapter.is_unwanted:
            del self._adapters[adapter.digest]
            return
        self._fail(adapter, from_record(message.error))

    # ---- what the engine does every step

    def poll(self) -> None:
        """Give room to whoever waits for it, and take in the copies that have arrived. Cheap when nobody does.

        Room first: an adapter that arrives in this call cannot be evicted before the scheduler has seen it READY.
        """
        for adapter in list(self._placing):
            if adapter.tried_at != self._slots.changes:
                self._try_to_place(adapter)
        for adapter in list(self._copying):
            if adapter.copy is not None and adapter.copy.is_done():
                self._arrive(adapter)

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
            assert (adapter.error is not None) == (state is AdapterState.FAILED), f"{state} and its error"
            assert (adapter in self._placing) == (state is AdapterState.PLACING), f"{state} waits for room"
            assert (adapter in self._copying) == (state is AdapterState.COPYING), f"{state} is being copied"

    # ---- transitions

    def _try_to_place(self, adapter: Adapter) -> None:
        blob = adapter.blob
        assert blob is not None
        try:
            placement = self._slots.reserve(adapter.digest, blob.layout, adapter.digest in self._pinned)
        except LoraplexError as error:
            self._placing.remove(adapter)
            adapter.refused = blob.layout
            self._fail(adapter, error)
            return
        if placement is None:
            adapter.tried_at = self._slots.changes
            return
        for evicted in placement.evicted:
            self._arena.clear(evicted.handle.slot)
            del self._adapters[evicted.digest]
        self._placing.remove(adapter)
        adapter.handle = placement.handle
        self._start_copy(adapter, blob, placement.chunk_offsets)

    def _start_copy(self, adapter: Adapter, blob: Acquired, chunk_offsets: Sequence[int]) -> None:
        assert adapter.handle is not None
        try:
            adapter.copy = self._arena.load(adapter.handle.slot, blob.layout, chunk_offsets, blob.host_offset)
        except LoraplexError as error:
            self._slots.release(adapter.handle)
            self._slots.free(adapter.handle)
            adapter.handle = None
            self._fail(adapter, error)
            return
        adapter.state = AdapterState.COPYING
        self._copying.append(adapter)

    def _arrive(self, adapter: Adapter) -> None:
        assert adapter.handle is not None
        self._copying.remove(adapter)
        adapter.copy = None
        adapter.state = AdapterState.READY
        self._give_blob_back(adapter)
        self._slots.touch(adapter.digest)
        self._slots.release(adapter.handle)
        if adapter.is_unwanted:
            self._free(adapter)

    def _fail(self, adapter: Adapter, error: LoraplexError) -> None:
        now = self._clock()
        for digest in [a.digest for a in self._adapters.values() if a.error is not None and now >= a.forget_at]:
            del self._adapters[digest]
        self._give_blob_back(adapter)
        adapter.state = AdapterState.FAILED
        adapter.error = error
        at_least = 0.0 if isinstance(error, AdapterMemory) and error.retry_after else self._failure_seconds
        adapter.forget_at = now + max(at_least, error.retry_after or 0.0)

    def _may_try_again(self, adapter: Adapter) -> bool:
        has_room = adapter.refused is not None and self._slots.can_hold(adapter.refused)
        return has_room or self._clock() >= adapter.forget_at

    def _free(self, adapter: Adapter) -> None:
        assert adapter.handle is not None
        self._arena.clear(adapter.handle.slot)
        self._slots.free(adapter.handle)
        del self._adapters[adapter.digest]

    def _give_blob_back(self, adapter: Adapter) -> None:
        if adapter.blob is not None:
            adapter.blob = None
            self._release_blob(adapter.digest)

    def _references(self, adapter: Adapter) -> int:
        resident = self._slots.find(adapter.digest)
        return resident.references if resident else 0
