"""Copies of adapters from the host arena to the device: in order, in pieces, so many bytes in flight at a time."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# A step's small metadata copies queue behind the adapter copies on the same copy engine. Those issued while a long step
# runs have arrived before the next one's metadata: the longer the steps, the more may be in flight.
LEAST_IN_FLIGHT = 8 << 20
MOST_IN_FLIGHT = 32 << 20
LINK_SHARE = 12e9  # bytes a second, about a quarter of a PCIe 5 link


class Piece(NamedTuple):
    """Bytes that are copied at once. Both are flat and uint8."""

    target: Tensor
    source: Tensor


class Arrival(Protocol):
    """Of what was issued together; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened; never waits."""
        ...


class Link(Protocol):
    """Where pieces go, one after the other."""

    def follow_steps(self) -> None:
        """What is issued from now on waits for every step launched so far."""
        ...

    def issue(self, pieces: Iterable[Piece]) -> Arrival:
        """Start to copy; never waits where copies are asynchronous."""
        ...


class SideStream:
    """A `Link` to a GPU: copies beside the steps, from page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def follow_steps(self) -> None:
        """See `Link`."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def issue(self, pieces: Iterable[Piece]) -> Arrival:
        """See `Link`."""
        with torch.cuda.stream(self._stream):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
            arrival: Arrival = self._stream.record_event()
        return arrival


class AdapterCopy:
    """One adapter on its way. `pieces`: not yet issued. `arrive` is called once, when the last one is there."""

    def __init__(self, queue: "CopyQueue", pieces: Iterable[Piece], arrive: Callable[[], None]) -> None:
        self.pieces = deque(pieces)
        self.bytes_left = sum(piece.target.numel() for piece in self.pieces)
        self.arrive = arrive
        self.has_arrived = False
        self._queue = queue

    def is_done(self) -> bool:
        """Whether the next step may use the adapter and the blob may go. Never waits; moves all copies on."""
        if not self.has_arrived:
            self._queue.advance()
        return self.has_arrived


class Batch(NamedTuple):
    """Pieces issued together. `completes`: the copies whose last pieces are among them."""

    arrival: Arrival
    nbytes: int
    completes: Sequence[AdapterCopy]


class CopyQueue:
    """Copies in the order in which they were added.

    Args:
        link: What copies.
        clock: Seconds, monotonic.
    """

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._copies: deque[AdapterCopy] = deque()
        self._batches: deque[Batch] = deque()
        self._advanced_at = clock()

    def add(self, pieces: Iterable[Piece], arrive: Callable[[], None]) -> AdapterCopy:
        """A copy behind the others. Where it goes may have been another adapter's: it waits for every step launched so
        far."""
        copy = AdapterCopy(self, pieces, arrive)
        self._link.follow_steps()
        self._copies.append(copy)
        self.advance()
        return copy

    def advance(self) -> None:
        """Finish the copies that have arrived, in order, and issue the next pieces. Never waits."""
        while self._batches and self._batches[0].arrival.query():
            for copy in self._batches.popleft().completes:
                copy.has_arrived = True
                copy.arrive()
        if self._copies:
            self._issue(self._allowance())

    def _allowance(self) -> int:
        """Bytes that may be in flight until the next call, which comes after about as long as this one did."""
        now, before = self._clock(), self._advanced_at
        self._advanced_at = now
        return int(min(max((now - before) * LINK_SHARE, LEAST_IN_FLIGHT), MOST_IN_FLIGHT))

    def _issue(self, most: int) -> None:
        """Issue the next pieces, once half of what may be in flight has arrived, so that the link is never idle."""
        in_flight = sum(batch.nbytes for batch in self._batches)
        if in_flight > most // 2:
            return
        chosen: list[Piece] = []
        completes: list[AdapterCopy] = []
        nbytes = 0
        while self._copies and in_flight + nbytes < most:
            copy = self._copies[0]
            if copy.pieces:
                piece = copy.pieces.popleft()
                chosen.append(piece)
                nbytes += piece.target.numel()
                copy.bytes_left -= piece.target.numel()
            if not copy.pieces:
                completes.append(self._copies.popleft())
        self._batches.append(Batch(self._link.issue(chosen), nbytes, completes))
