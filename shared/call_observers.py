"""Tells who wants to know of every call of ours that begins, and how it ended: metrics and traces."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc

from shared.call_ends import cut_off_by

OWN_SERVICES = "/loraplex."

EndCall = Callable[[grpc.StatusCode], None]


class CallObserver(Protocol):
    """Hears of calls, in the task that handles each. `method` is `/package.Service/Method`."""

    def begin(self, method: str, context: Any) -> EndCall:
        """A call begins; what is returned is called once, at its end. Neither may raise."""
        ...


class ObservingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before the interceptors that turn errors into statuses. Health and reflection are not observed."""

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._observers = tuple(observers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OWN_SERVICES):
            return handler
        parse, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            stream = self._stream(handler.unary_stream, method)
            return grpc.unary_stream_rpc_method_handler(stream, parse, write)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), parse, write)

    def _unary(self, behaviour: Any, method: str) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            with self._observed(method, context):
                return await behaviour(request, context)

        return handle

    def _stream(self, behaviour: Any, method: str) -> Any:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._observed(method, context):
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response

        return handle

    @contextmanager
    def _observed(self, method: str, context: Any) -> Any:
        ends = [observer.begin(method, context) for observer in self._observers]
        code = grpc.StatusCode.UNKNOWN
        try:
            yield
            code = grpc.StatusCode.OK
        except BaseException as error:
            code = code_of(error, context)
            raise
        finally:
            for end in ends:
                end(code)


def code_of(error: BaseException, context: Any) -> grpc.StatusCode:
    """What the caller of a call that ended with `error` is told, or would be if it were there."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        cause = cut_off_by(context)
        return grpc.StatusCode.CANCELLED if cause is None else grpc.StatusCode[cause.code]
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else _BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN)


_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
