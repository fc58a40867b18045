"""Adapters in slots: handles, what a resident takes, and what changes when room is made. Plain ints."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from inference_service.lora.gaps import Range
from inference_service.types import PinOwner


class Handle(NamedTuple):
    """A slot, and the how-manieth use of it. A handle of an earlier use is stale."""

    slot: int
    generation: int


class Evicted(NamedTuple):
    """An adapter that made room, for want of `bytes` or `slots`."""

    digest: str
    handle: Handle
    reason: Literal["bytes", "slots"]


class Move(NamedTuple):
    """`nbytes` of a resident adapter go from `source` to `target` in the arena, which is the lower; they may overlap.

    Moves are made in order: one may write where an earlier one read.
    """

    handle: Handle
    source: int
    target: int
    nbytes: int


class Placement(NamedTuple):
    """Where an adapter goes: its slot, and the arena offset of each of its chunks."""

    handle: Handle
    chunk_offsets: tuple[int, ...]


class Room(NamedTuple):
    """What an attempt to place an adapter has changed, in this order: who was evicted, what moves, where it goes.

    Without a `placement` it must wait: for references to drop if nobody was evicted and nothing moved, else for a
    next call, which moves more.
    """

    evicted: tuple[Evicted, ...] = ()
    moves: tuple[Move, ...] = ()
    placement: Placement | None = None


class StaleHandle(LookupError):
    """The slot has been given to another adapter, or freed, since this handle was made."""


@dataclass
class Resident:
    """One adapter in a slot. `ranges`: its chunks in the arena. `references`: whoever may not lose it.

    `pinned_by`: whom it stays for. `owner`: the tenant whose requests brought it, or "".
    `is_arriving`: its bytes are on their way and cannot be moved.
    """

    digest: str
    handle: Handle
    ranges: tuple[Range, ...]
    rank: int
    references: int
    pinned_by: tuple[PinOwner, ...]
    owner: str = ""
    is_arriving: bool = True

    @property
    def nbytes(self) -> int:
        """Arena bytes it takes."""
        return length(self.ranges)

    @property
    def pinned(self) -> bool:
        """Whether it stays."""
        return bool(self.pinned_by)

    @property
    def is_evictable(self) -> bool:
        """Whether it may make room."""
        return not self.references and not self.pinned


def length(ranges: Iterable[Range]) -> int:
    """Bytes of all."""
    return sum(taken.size for taken in ranges)
