"""An API process's end of the engine's socket: streams by request, calls by number. Torch-free."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import zmq
import zmq.asyncio

from inference_service.engine.event_queue import MAX_UNREAD, Event, EventQueue
from inference_service.stats import EngineStats
from inference_service.types import (
    Abort,
    CancelCall,
    EngineReady,
    EngineRequest,
    EngineResponse,
    GenerateSpec,
    GetStats,
    Hello,
    ListResident,
    LoadAdapter,
    Reply,
    ResidentAdapter,
    StepOutput,
    Submit,
    UnloadAdapter,
    decode_engine_response,
    encode,
)
from shared.errors import EngineUnavailable, Internal, LoraplexError, RequestIdReused, from_record

Call = LoadAdapter | UnloadAdapter | ListResident | GetStats
RETRY_AFTER_SECONDS = 1.0


class EngineClient:
    """Speaks with one engine process, from one event loop.

    Args:
        address: ZeroMQ address of the engine's ROUTER (`ipc://…`).
        identity: This API process's name, unique among the engine's clients.
        max_unread: Tokens and logprobs of a request that may wait for who reads it.
    """

    def __init__(self, address: str, identity: str, max_unread: int = MAX_UNREAD) -> None:
        self.address = address
        self.identity = identity.encode()
        self.max_unread = max_unread
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[EngineReady] | None = None
        self._down = asyncio.Event()
        self._streams: dict[str, EventQueue] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0

    @property
    def is_up(self) -> bool:
        """Whether the engine has answered `hello` and has not gone down since."""
        return self._ready is not None and self._ready.done()

    def start(self) -> None:
        """Connect, from within the event loop. Nothing is sent; the engine need not exist yet."""
        if self._socket is not None:
            return
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.identity)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.address)
        self._down.clear()
        self._tasks = [asyncio.create_task(self._read(self._socket)), asyncio.create_task(self._watch(monitor))]

    async def hello(self) -> EngineReady:
        """What the engine says of itself, as soon as it is warm; waits for as long as that takes.

        Raises:
            EngineUnavailable: It went away meanwhile.
        """
        self.start()
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._send(Hello())
        return await asyncio.shield(self._ready)

    async def wait_down(self) -> None:
        """Returns when the engine has gone down (seen by its closed connection, or by `engine_down`)."""
        await self._down.wait()

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Event, None]:
        """The events of one request until all its sequences have ended. Closing the iterator early aborts it.

        Raises:
            EngineUnavailable: There is no engine, or it went away.
            RequestIdReused: A request with this id is in flight here.
            LoraplexError: What the engine ended the request with.
        """
        self._check_up()
        if spec.request_id in self._streams:
            raise RequestIdReused.of("request_id", "is in flight")
        events = self._streams[spec.request_id] = EventQueue(spec.sampling.n, self.max_unread)
        try:
            self._send(Submit(spec))
            while (event := await events.get()) is not None:
                yield event
        finally:
            del self._streams[spec.request_id]
            if events.unfinished:
                self._send(Abort(spec.request_id))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences: its stream has no more of it. Unknown ones are ignored."""
        events = self._streams.get(request_id)
        if events is None:
            return
        for each in tuple(events.unfinished) if index is None else (index,):
            events.abandon(each)
        self._send(Abort(request_id, index))

    async def load_adapter(self, digest: str, *, pinned: bool, wait: bool, prepare_seconds: float = 0.0) -> None:
        """Bring an adapter into a slot; returns when it is READY, or at once if not `wait`. Raises its error.

        `prepare_seconds`: what it took the adapter process to have it ready for this.
        """
        await self.call(LoadAdapter(self._next_call(), digest, pinned, wait, prepare_seconds=prepare_seconds))

    async def unload_adapter(self, digest: str, *, force: bool) -> None:
        """Drain and free an adapter's slot; returns when the memory is free."""
        await self.call(UnloadAdapter(self._next_call(), digest, force))

    async def list_resident(self) -> list[ResidentAdapter]:
        """Adapters in slots."""
        return (await self.call(ListResident(self._next_call()))).resident

    async def stats(self) -> EngineStats:
        """How the engine is doing."""
        stats = (await self.call(GetStats(self._next_call()))).engine_stats
        if stats is None:
            raise Internal("internal error (the engine's statistics are missing)")
        return stats

    async def call(self, message: Call) -> Reply:
        """Send a message with a `call_id` of this client's own and wait for its reply; raises the reply's error."""
        self._check_up()
        future = self._calls[message.call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            reply: Reply = await future
        except asyncio.CancelledError:
            self._send(CancelCall(message.call_id))
            raise
        finally:
            self._calls.pop(message.call_id, None)
        if reply.error is not None:
            raise from_record(reply.error)
        return reply

    def engine_down(self) -> None:
        """The engine is gone: end everything in flight, and refuse new work until `hello` succeeds again."""
        error = EngineUnavailable("the engine is restarting", retry_after=RETRY_AFTER_SECONDS)
        for events in self._streams.values():
            events.fail(error)
        for future in self._calls.values():
            _fail(future, error)
        if self._ready is not None:
            _fail(self._ready, error)
        self._ready = None
        self._disconnect()  # what the old engine did not read must not reach the new one
        self._down.set()

    async def close(self) -> None:
        """Fail what is in flight and free the sockets."""
        tasks = self._tasks
        self.engine_down()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _check_up(self) -> None:
        if not self.is_up:
            raise EngineUnavailable("the engine is not ready", retry_after=RETRY_AFTER_SECONDS)

    def _send(self, message: EngineRequest) -> None:
        if self._socket is not None:
            self._socket.send(encode(message), zmq.NOBLOCK)

    def _disconnect(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        self._socket, self._tasks = None, []

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._dispatch(decode_engine_response(await socket.recv()))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        self.engine_down()

    def _dispatch(self, message: EngineResponse) -> None:
        if isinstance(message, EngineReady):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Reply):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            self._dispatch_output(message)

    def _dispatch_output(self, output: StepOutput) -> None:
        in_order: list[Event] = [*output.started, *output.prompt_logprobs, *output.deltas]
        for event in in_order:
            events = self._streams.get(event.request_id)
            if events is not None and not events.put(event):
                self._send(Abort(event.request_id))
        for failure in output.failed:
            events = self._streams.get(failure.request_id)
            if events is not None:
                events.fail(from_record(failure.error))


def _fail(future: asyncio.Future[Any], error: LoraplexError) -> None:
    """Fail a future that may have lost its waiter; asyncio would log an error that nobody retrieves."""
    if not future.done():
        future.set_exception(error)
        future.exception()
