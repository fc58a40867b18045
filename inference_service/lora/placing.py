"""From a blob in host memory to an adapter that is READY: room, then the copy. Torch-free."""

from typing import Protocol

from inference_service.lora.adapter import Adapter, AdapterState
from inference_service.lora.pins import Pins
from inference_service.lora.residents import Placement
from inference_service.lora.table import AdapterTable
from inference_service.types import Acquired
from shared.errors import LoraplexError


class Listener(Protocol):
    """Hears of evictions; `pool.AdapterPool` is one."""

    def evicted(self, digest: str) -> None: ...


class Placing:
    """Adapters that wait for room, and those that are being copied, each in the order in which they came.

    Args:
        table: Every adapter.
        pins: Which adapters are placed to stay.
        listener: Is told who made room.
    """

    def __init__(self, table: AdapterTable, pins: Pins, listener: Listener) -> None:
        self._table = table
        self._pins = pins
        self._listener = listener
        self.waiting: list[Adapter] = []
        self.copying: list[Adapter] = []

    def add(self, adapter: Adapter) -> None:
        """Its blob is in host memory."""
        self._table.enter(adapter, AdapterState.PLACING, "acquire")
        self.waiting.append(adapter)

    def give_up(self, adapter: Adapter) -> None:
        """One that waits for room goes."""
        self.waiting.remove(adapter)
        self._table.slots.give_up(adapter.digest)
        self._table.give_blob_back(adapter)
        del self._table.by_digest[adapter.digest]

    def poll(self) -> None:
        """Give room to whoever waits for it, and take in the copies that have arrived.

        Room first: an adapter that arrives in this call cannot be evicted before the scheduler has seen it READY.
        Smaller ones pass one that finds no room, unless it is overdue: they would for ever.
        """
        for adapter in list(self.waiting):
            if adapter.tried_at != self._table.slots.changes:
                self._try_to_place(adapter)
            if adapter.is_overdue and adapter.state is AdapterState.PLACING:
                break
        for adapter in list(self.copying):
            if adapter.copy is not None and adapter.copy.is_done():
                self._arrive(adapter)

    def check_integrity(self) -> None:
        """Raise AssertionError unless lines and states agree."""
        for adapter in self._table.by_digest.values():
            state = adapter.state
            assert (adapter in self.waiting) == (state is AdapterState.PLACING), f"{state} waits for room"
            assert (adapter in self.copying) == (state is AdapterState.COPYING), f"{state} is being copied"

    def _try_to_place(self, adapter: Adapter) -> None:
        blob, slots = adapter.blob, self._table.slots
        assert blob is not None
        try:
            pinned_by = self._pins.owners(adapter.digest)
            room = slots.reserve(adapter.digest, blob.layout, pinned_by, adapter.tenant)
        except LoraplexError as error:
            self.waiting.remove(adapter)
            adapter.refused = blob.layout
            self._table.fail(adapter, error)
            return
        for evicted in room.evicted:
            self._listener.evicted(evicted.digest)
            self._table.evicted(evicted)
        self._table.move(room.moves)
        if room.placement is not None:
            self.waiting.remove(adapter)
            self._start_copy(adapter, blob, room.placement)
        elif not room.moves:
            adapter.tried_at = slots.changes

    def _start_copy(self, adapter: Adapter, blob: Acquired, placement: Placement) -> None:
        handle, offsets = placement
        try:
            adapter.copy = self._table.arena.load(handle.slot, blob.layout, offsets, blob.host_offset)
        except LoraplexError as error:
            self._table.slots.release(handle)
            self._table.slots.free(handle)
            self._table.fail(adapter, error)
            return
        adapter.handle, adapter.layout = handle, blob.layout
        self._table.enter(adapter, AdapterState.COPYING, "place")
        self.copying.append(adapter)

    def _arrive(self, adapter: Adapter) -> None:
        assert adapter.handle is not None
        table, slots = self._table, self._table.slots
        self.copying.remove(adapter)
        adapter.copy = None
        table.counters.load_seconds["total"].add(table.clock() - adapter.began)
        table.enter(adapter, AdapterState.READY, "copy")
        table.give_blob_back(adapter)
        slots.arrived(adapter.handle)
        slots.touch(adapter.digest)
        slots.release(adapter.handle)
        if adapter.is_unwanted:
            table.unload(adapter)
