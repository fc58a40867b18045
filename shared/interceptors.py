"""Server interceptors: domain errors become rich statuses, and nothing else leaves the process."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shared.errors import Internal, InvalidArgument, LoraplexError
from shared.status import to_grpc_status

log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns exceptions of our own handlers (unary-unary and unary-stream) into statuses.

    A `LoraplexError` keeps its code, message and details. Anything else becomes INTERNAL with an id that the log
    repeats beside the traceback; the exception's text stays in the log.

    Args:
        check: Called before each handler; what it raises is the call's end.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/loraplex."):
            return handler
        parse = _reader(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method, self._check), parse, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _unary(handler.unary_unary, method, self._check), parse, handler.response_serializer
        )


class _Malformed:
    """Stands for a request whose bytes are no message, so that the handler can answer with a typed error."""


def _reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Malformed()

    return read


def _check_message(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise InvalidArgument.of("request", "is not a valid message; strings must be UTF-8")


def _unary(behaviour: Any, method: str, check: Callable[[], None]) -> Any:
    async def handle(request: Any, context: Any) -> Any:
        try:
            check()
            _check_message(request)
            return await behaviour(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await context.abort_with_status(to_grpc_status(_public(error, method)))

    return handle


def _stream(behaviour: Any, method: str, check: Callable[[], None]) -> Any:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            check()
            _check_message(request)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as error:
            await context.abort_with_status(to_grpc_status(_public(error, method)))

    return handle


def _public(error: Exception, method: str) -> LoraplexError:
    if isinstance(error, LoraplexError):
        return error
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s in %s", error_id, method, exc_info=error)
    return Internal(f"internal error (id {error_id})", metadata={"id": error_id})
