"""The adapter process's calls to the engine: bring an adapter to the device, let go of others, say what is there."""

import asyncio
from collections.abc import Set
from contextlib import suppress
from itertools import count

import zmq
import zmq.asyncio

from inference_service.stats import EngineStats
from inference_service.types import (
    CancelCall,
    GetStats,
    KeepPins,
    ListResident,
    LoadAdapter,
    Reply,
    ResidentAdapter,
    decode_engine_response,
    encode,
)
from shared.errors import EngineUnavailable, Internal, from_record

ASK_SECONDS = 2.0
LOAD_SECONDS = 60.0
_IDENTITY = b"adapters"

Call = LoadAdapter | KeepPins | ListResident | GetStats


class EnginePort:
    """One DEALER to the engine's ROUTER. ZeroMQ reports no dead peer, so every call has a limit."""

    def __init__(self, address: str) -> None:
        """Inside the event loop that will use it. The engine need not exist yet."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, _IDENTITY)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # what one engine did not read must not reach the next
        self._socket.connect(address)
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def load(self, digest: str, *, pinned: bool, prepare_seconds: float = 0.0) -> None:
        """Returns when the adapter is READY on the device. Raises its error, or EngineUnavailable.

        `prepare_seconds`: what it took to have its files here.
        """
        load = LoadAdapter(next(self._ids), digest, pinned, True, "registry", prepare_seconds)
        await self._call(load, LOAD_SECONDS)

    async def keep_pins(self, digests: Set[str]) -> None:
        """Ends all pins that `load` has ever set, here or in a process before this one, but those of `digests`."""
        await self._call(KeepPins(next(self._ids), tuple(sorted(digests))), ASK_SECONDS)

    async def residents(self) -> list[ResidentAdapter]:
        """What is on the device."""
        return (await self._call(ListResident(next(self._ids)), ASK_SECONDS)).resident

    async def free_bytes(self) -> int:
        """Of the device's memory for adapters, as long as nothing is evicted; 0 if no slot is free."""
        stats: EngineStats | None = (await self._call(GetStats(next(self._ids)), ASK_SECONDS)).engine_stats
        if stats is None:
            raise Internal("internal error (the engine's statistics are missing)")
        has_slot = stats.slots.used < stats.slots.total
        return stats.arena.total - stats.arena.used if has_slot else 0

    async def close(self) -> None:
        """Ends what is in flight."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    async def _call(self, message: Call, seconds: float) -> Reply:
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[message.call_id] = waiting
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send(encode(message))
                reply = await waiting
        except TimeoutError:
            with suppress(zmq.Again):
                await self._socket.send(encode(CancelCall(message.call_id)), zmq.NOBLOCK)
            raise EngineUnavailable("the engine does not answer", retry_after=1.0) from None
        finally:
            del self._waiting[message.call_id]
        if reply.error is not None:
            raise from_record(reply.error)
        return reply

    async def _read(self) -> None:
        while True:
            message = decode_engine_response(await self._socket.recv())
            waiting = self._waiting.get(message.call_id) if isinstance(message, Reply) else None
            if waiting is not None and not waiting.done():
                waiting.set_result(message)  # type: ignore[arg-type]  # only a Reply has a call_id
