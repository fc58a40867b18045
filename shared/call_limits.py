"""How many calls a process has at once, and how long a client may take to read what a stream has for it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from shared.call_ends import CUT, Cut
from shared.errors import ClientTooSlow, LoraplexError, QueueFull
from shared.status import to_grpc_status

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
_OWN = "/loraplex."  # methods whose handlers call `check`
_PROBE = "/grpc.health.v1.Health/Check"  # must be answered however many calls there are
_LOOKS = 8  # at each stream while a client may be slow


@dataclass(eq=False)
class _Stream:
    """A stream under way. `since`: when its client was given a message that it has not taken yet."""

    task: "asyncio.Task[Any]"
    cut: Cut
    since: float | None = None


@dataclass(eq=False)
class CallLimits(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before all other interceptors, because it is who writes to streams.

    A stream is cut when its client leaves no room for a message for `slow_client_seconds`: its handler ends, which
    frees all it holds, and its status is CLIENT_TOO_SLOW, behind what the client has not read yet. It counts as a call
    until the client has read that or is gone.

    Args:
        max_calls: At once, of all services; 0 for any number.
        slow_client_seconds: 0 for any time.
    """

    max_calls: int
    slow_client_seconds: float
    _running: "set[asyncio.Task[Any]]" = field(default_factory=set)
    _streams: dict[_Stream, None] = field(default_factory=dict)
    _next_look: asyncio.TimerHandle | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method == _PROBE:
            return handler
        is_own = method.startswith(_OWN)
        parse, write = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming:  # reflection, which waits for its client
            return grpc.stream_stream_rpc_method_handler(self._both(handler.stream_stream), parse, write)
        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, is_own), parse, write)
        behaviour = handler.unary_stream
        handle = self._written(behaviour, method) if is_own else self._unary(behaviour, is_own)
        return grpc.unary_stream_rpc_method_handler(handle, parse, write)

    def check(self) -> None:
        """Returns if there is room for the call of this task, which is counted already. Raises QueueFull."""
        if 0 < self.max_calls < len(self._running):
            self._running.discard(_this_task())
            raise self._refusal()

    def _unary(self, behaviour: Any, is_own: bool) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            if not is_own and self._is_full():
                await _end(context, self._refusal())
            with self._counted():
                return await behaviour(request, context)

        return handle

    def _both(self, behaviour: Any) -> Any:
        async def handle(requests: Any, context: Any) -> AsyncIterator[Any]:
            if self._is_full():
                await _end(context, self._refusal())
            with self._counted():
                async for response in behaviour(requests, context):
                    yield response

        return handle

    def _written(self, behaviour: Any, method: str) -> Any:
        async def handle(request: Any, context: Any) -> None:
            with self._counted():
                try:
                    with self._watched() as stream:
                        await _write(behaviour(request, context), context, stream)
                except asyncio.CancelledError:
                    if not stream.cut.is_slow or context.cancelled():
                        raise
                    stream.task.uncancel()
                    log.warning("a client did not read its stream", extra={"method": method, "peer": context.peer()})
                    await _end(context, self._slow())

        return handle

    def _is_full(self) -> bool:
        return 0 < self.max_calls <= len(self._running)

    def _refusal(self) -> LoraplexError:
        return QueueFull(
            f"{self.max_calls} calls are under way here, which is the limit",
            metadata={"limit": "calls", "value": str(self.max_calls)},
            retry_after=RETRY_AFTER_SECONDS,
        )

    def _slow(self) -> LoraplexError:
        return ClientTooSlow(
            f"the client has taken nothing of its stream for {self.slow_client_seconds:g} seconds",
            metadata={"seconds": f"{self.slow_client_seconds:g}"},
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        task = _this_task()
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    @contextmanager
    def _watched(self) -> Iterator[_Stream]:
        stream = _Stream(_this_task(), Cut())
        CUT.set(stream.cut)  # each call has a task, and so a context, of its own
        self._streams[stream] = None
        if self._next_look is None and self.slow_client_seconds:
            self._look()
        try:
            yield stream
        finally:
            del self._streams[stream]

    def _look(self) -> None:
        """Cuts who is too slow. One timer for all streams: one for each message would cost more than the message."""
        self._next_look = None
        if not self._streams:
            return
        overdue = time.monotonic() - self.slow_client_seconds
        for stream in self._streams:
            if stream.since is not None and stream.since < overdue and not stream.cut.is_slow:
                stream.cut.is_slow = True
                stream.task.cancel()
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(self.slow_client_seconds / _LOOKS, self._look)


def _this_task() -> "asyncio.Task[Any]":
    """Each call is handled in a task of its own."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def _write(responses: AsyncIterator[Any], context: Any, stream: _Stream) -> None:
    has_headers = False
    async with aclosing(responses):  # type: ignore[type-var]
        async for response in responses:
            if not has_headers:  # grpc.aio ends no call with a status while its headers wait with its first message
                await context.send_initial_metadata(())
                has_headers = True
            stream.since = time.monotonic()
            await context.write(response)
            stream.since = None


async def _end(context: Any, error: LoraplexError) -> None:
    await context.abort_with_status(to_grpc_status(error))
