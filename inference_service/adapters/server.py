"""The socket that API processes and the engine talk to: their messages, answered out of the loader."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from inference_service.adapters.flights import unforeseen
from inference_service.adapters.loader import AdapterLoader
from inference_service.adapters.residency import Residency
from inference_service.types import (
    Acquire,
    Acquired,
    AcquireFailed,
    AdapterRequest,
    AwaitResidency,
    DropStaged,
    EngineStarted,
    GetStats,
    ListStaged,
    Prepare,
    PrepareBlend,
    ReadTexts,
    Release,
    Reply,
    Resolve,
    decode_adapter_request,
    encode,
)
from shared.errors import LoraplexError

if TYPE_CHECKING:
    from shared.spans import Tracing

log = logging.getLogger(__name__)


class AdapterServer:
    """Answers the messages of one socket out of one loader."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        loader: AdapterLoader,
        residency: Residency | None = None,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._socket = socket
        self._tracing = tracing
        self._loader = loader
        self._residency = residency
        self._tasks: set[asyncio.Task[object]] = set()
        self._acquires: set[asyncio.Task[object]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                identity, *parts = await self._socket.recv_multipart()
                try:
                    self._dispatch(identity, decode_adapter_request(b"".join(parts)))
                except msgspec.MsgspecError as error:
                    log.warning("ignored a malformed message from %s: %s", identity.decode(errors="replace"), error)
        finally:
            for task in self._tasks:
                task.cancel()

    def _dispatch(self, identity: bytes, message: AdapterRequest) -> None:
        match message:
            case Prepare() | PrepareBlend() | ReadTexts() | Resolve():
                self._start(self._answer(identity, message))
            case AwaitResidency():
                self._start(self._await_residency(identity, message))
            case Acquire():
                task = self._start(self._acquire(identity, message))
                self._acquires.add(task)
                task.add_done_callback(self._acquires.discard)
            case Release():
                self._loader.release(message.digest)
            case DropStaged():
                freed = self._loader.drop(message.digest)
                self._start(self._send(identity, Reply(message.call_id, freed_bytes=freed)))
            case ListStaged():
                find = self._loader.known if message.names_only else self._loader.staged
                self._start(self._send(identity, Reply(message.call_id, staged=find(message.digests))))
            case GetStats():
                self._start(self._send(identity, Reply(message.call_id, adapter_stats=self._loader.stats())))
            case EngineStarted():
                for task in self._acquires:
                    task.cancel()
                self._loader.engine_started()
                if self._residency is not None:
                    self._residency.engine_started()

    def _start(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, identity: bytes, message: Prepare | PrepareBlend | ReadTexts | Resolve) -> None:
        try:
            with self._span(message):
                reply = await self._reply(message)
        except LoraplexError as error:
            reply = Reply(message.call_id, error=error.record())
        except Exception as error:
            reply = Reply(message.call_id, error=unforeseen(error, repr(message)).record())
        await self._send(identity, reply)

    def _span(self, message: Prepare | PrepareBlend | ReadTexts | Resolve) -> AbstractContextManager[None]:
        """Around what is done for a request that is traced; what the registry is asked there belongs to it."""
        if self._tracing is None or not isinstance(message, Prepare | PrepareBlend) or not message.traceparent:
            return nullcontext()
        return self._tracing.continued("prepare adapter", message.traceparent)

    async def _reply(self, message: Prepare | PrepareBlend | ReadTexts | Resolve) -> Reply:
        match message:
            case Prepare(call_id, reference, choice_key, _):
                return Reply(call_id, adapter=await self._loader.prepare(reference, choice_key))
            case PrepareBlend(call_id, parts, choice_key, _):
                return Reply(call_id, adapter=await self._loader.prepare_blend(parts, choice_key))
            case ReadTexts(call_id, digest):
                return Reply(call_id, texts=await self._loader.read_texts(digest))
            case Resolve(call_id, reference):
                return Reply(call_id, digest=await self._loader.resolve(reference))

    async def _await_residency(self, identity: bytes, message: AwaitResidency) -> None:
        if self._residency is not None and not await self._residency.settle(message.seconds):
            log.warning("not every adapter that is wanted here came in time", extra={"seconds": message.seconds})
        await self._send(identity, Reply(message.call_id))

    async def _acquire(self, identity: bytes, message: Acquire) -> None:
        digest, session = message.digest, message.session
        try:
            blob = await self._loader.acquire(digest)
        except LoraplexError as error:
            await self._send(identity, AcquireFailed(digest, error.record(), session))
            return
        except Exception as error:
            await self._send(identity, AcquireFailed(digest, unforeseen(error, digest).record(), session))
            return
        if not await self._send(identity, Acquired(digest, blob.offset, blob.layout, session)):
            self._loader.release(digest)

    async def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """False if the peer is gone, or does not read what it is sent."""
        try:
            await self._socket.send_multipart([identity, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("not sent to %s: %s", identity.decode(errors="replace"), error)
            return False
        return True
