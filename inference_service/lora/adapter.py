"""One adapter as the slot pool knows it, and what the pool needs of the arena."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from inference_service.lora.residents import Handle, Move
from inference_service.stats import LoadInFlight
from inference_service.types import Acquired, BlobLayout
from shared.errors import LoraplexError


class AdapterState(StrEnum):
    WANTED = "WANTED"
    ACQUIRING = "ACQUIRING"
    PLACING = "PLACING"
    COPYING = "COPYING"
    READY = "READY"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


class Wanted(NamedTuple):
    """An adapter that requests of `tenant` wait for. `prepare_seconds` were spent for the first of them before.

    `is_overdue`: they have waited for too long.
    """

    digest: str
    tenant: str
    prepare_seconds: float = 0.0
    is_overdue: bool = False


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
    `is_overdue`: until it has room, what comes behind it takes none.
    `is_ordered`: an operator asked for it; it is placed whether or not requests wait.
    `began`, `phase_began`: when its load, with what was done for it before, and the state it is in began.
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
    is_overdue: bool = False
    is_ordered: bool = False
    tried_at: int = -1
    refused: BlobLayout | None = None
    began: float = 0.0
    phase_began: float = 0.0

    @property
    def is_loading(self) -> bool:
        return self.state in (AdapterState.ACQUIRING, AdapterState.PLACING, AdapterState.COPYING)

    def load_in_flight(self, now: float) -> LoadInFlight:
        """How far its load is."""
        total = self.blob.layout.nbytes if self.blob else 0
        done = total - self.copy.bytes_left if self.copy else 0
        progress = done / total if self.copy and total else 0.0
        return LoadInFlight(self.digest, self.state.value, progress, now - self.began, done, total)
