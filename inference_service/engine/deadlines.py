"""Requests by the time until which their answers must be complete."""

import heapq
from collections.abc import Iterator

from inference_service.engine.sequence import Request

_FEW = 64


class Deadlines:
    """Of requests that have one. Those that have ended are forgotten as they come up, or once they are most of all."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def add(self, request: Request, num_requests: int) -> None:
        """A request, if it has a deadline. `num_requests`: those that are here, it among them."""
        if request.spec.deadline is None:
            return
        heapq.heappush(self._entries, (request.spec.deadline, request.order, request))
        if len(self._entries) > 2 * num_requests + _FEW:
            self._entries = [entry for entry in self._entries if entry[2].live]
            heapq.heapify(self._entries)

    def earliest(self) -> float | None:
        """That of a request that is still here."""
        while self._entries and not self._entries[0][2].live:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def expired(self, now: float) -> Iterator[Request]:
        """Takes out the requests that should have ended by `now`."""
        while (deadline := self.earliest()) is not None and deadline <= now:
            yield heapq.heappop(self._entries)[2]
