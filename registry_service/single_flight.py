"""One task per key: whoever asks again while it runs waits for it, and a waiter that leaves does not stop it."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from shared.errors import FieldViolation, RequestIdReused

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Tasks that run now, by key."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, tuple[str, asyncio.Future[T]]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flights

    async def run(self, key: Hashable, request_hash: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, or of the work already running under `key`.

        Raises:
            RequestIdReused: what runs under `key` is another request.
        """
        running_hash, task = self._flights.get(key, (request_hash, None))
        if running_hash != request_hash:
            raise request_id_reused()
        if task is None:
            task = asyncio.ensure_future(work())
            self._flights[key] = (request_hash, task)
            task.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stops what still runs."""
        tasks = [task for _, task in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: Hashable, task: "asyncio.Future[T]") -> None:
        del self._flights[key]
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any more


def request_id_reused() -> RequestIdReused:
    """The error for an id that came with another request before."""
    return RequestIdReused([FieldViolation("request_id", "was used for a different request; make a new UUID")])
