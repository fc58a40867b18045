"""The threads that read sources for registrations: no tenant's sources, however they hang, hold up another tenant."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from registry_service.adapter_folder import Origin
from shared.sources.resolver import PinnedSource
from shared.sources.turns import SourceTurns

T = TypeVar("T")

PER_ORIGIN, PER_TENANT = 8, 16  # registrations that read at once
NUM_THREADS = 3 * PER_TENANT  # most wait for their sources


class SourceReaders:
    """Runs what blocks, in turns by namespace and origin. On one event loop."""

    def __init__(self) -> None:
        self._turns = SourceTurns(PER_ORIGIN, PER_TENANT)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="validation")
        self._readings: set[asyncio.Task[Any]] = set()

    async def read(self, origin: Origin, work: Callable[[threading.Event], T]) -> T:
        """`work(stopping)`, in a thread; `stopping` is set when nobody waits for it any more.

        Its place is free when the thread has ended: who leaves and comes again gets no second one meanwhile.
        """
        turn = AsyncExitStack()
        source = PinnedSource(origin.uri, credential_ref=origin.credential_ref)
        await turn.enter_async_context(self._turns.turn(origin.namespace, source.origin))
        stopping = threading.Event()
        reading = asyncio.get_running_loop().create_task(self._read(turn, work, stopping))
        self._readings.add(reading)
        reading.add_done_callback(self._ended)
        try:
            return await asyncio.shield(reading)
        finally:
            stopping.set()

    async def _read(self, turn: AsyncExitStack, work: Callable[[threading.Event], T], stopping: threading.Event) -> T:
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, stopping)

    def _ended(self, reading: asyncio.Task[Any]) -> None:
        self._readings.discard(reading)
        if not reading.cancelled():
            reading.exception()  # seen, also when nobody waits any more

    def close(self) -> None:
        """Gives up what still runs, without waiting for it."""
        for reading in self._readings:
            reading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
