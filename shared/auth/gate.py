"""The gate before every handler: authenticate, authorize by `RULES`, run the handler, write the audit log."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from shared.auth import audit
from shared.auth.authenticator import Authenticator
from shared.auth.caller import Caller
from shared.auth.rules import RULES, Rule
from shared.errors import LoraplexError, PermissionDenied

RECHECK_SECONDS = 5.0
REQUEST_ID = "x-request-id"
_OWN = "/loraplex."
_ID = re.compile(r"[\w.:@/+=-]{1,128}")


class AuthorizedCall:
    """The context of a call that passed the gate: gRPC's own, and who calls."""

    def __init__(self, context: Any, caller: Caller) -> None:
        self.caller = caller
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class AccessGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Handlers of ours run only for callers that `RULES` lets in. Health and reflection are open to everybody."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OWN):
            return handler
        rule = RULES.get(method)
        rpc = method.rpartition("/")[2]
        parse, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            stream = self._stream(handler.unary_stream, rule, rpc)
            return grpc.unary_stream_rpc_method_handler(stream, parse, write)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, rule, rpc), parse, write)

    def _unary(self, behaviour: Any, rule: Rule | None, rpc: str) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            caller = self._authenticate(context)
            if rule is None or not rule.is_change:
                _admit(caller, rule, request, rpc)
                return await behaviour(request, AuthorizedCall(context, caller))
            return await _audited(behaviour, request, AuthorizedCall(context, caller), rule, rpc)

        return handle

    def _stream(self, behaviour: Any, rule: Rule | None, rpc: str) -> Any:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            caller = self._authenticate(context)
            _admit(caller, rule, request, rpc)
            checked_at = time.monotonic()
            async with aclosing(behaviour(request, AuthorizedCall(context, caller))) as responses:
                async for response in responses:
                    if rule is not None and rule.is_endless and time.monotonic() > checked_at + RECHECK_SECONDS:
                        _check_same(caller, self._authenticate(context))
                        checked_at = time.monotonic()
                    yield response

        return handle

    def _authenticate(self, context: Any) -> Caller:
        return self._authenticator.caller(context.invocation_metadata() or (), context.auth_context())


def _admit(caller: Caller, rule: Rule | None, request: Any, rpc: str) -> None:
    if rule is None:
        raise PermissionDenied(f"nobody may call {rpc}: it has no rule")
    rule.scope.check(caller, rule.roles, request)


def _check_same(before: Caller, now: Caller) -> None:
    """A stream was opened by other rights than its caller has now."""
    if before != now:
        raise PermissionDenied("the caller's roles have changed: open the stream again")


async def _audited(behaviour: Any, request: Any, call: AuthorizedCall, rule: Rule, rpc: str) -> Any:
    """Lets in and runs the handler; a change that is refused, fails or is cut off is written down as well."""
    outcome, response = "INTERNAL", None
    try:
        _admit(call.caller, rule, request, rpc)
        response = await behaviour(request, call)
        outcome = "OK"
        return response
    except LoraplexError as error:
        outcome = error.reason
        raise
    except asyncio.CancelledError:
        outcome = "CANCELLED"
        raise
    finally:
        if not _is_trial(request, response):
            try:
                resource = rule.scope.resource(call.caller, request)
            except LoraplexError:
                resource = ""  # its name cannot be read
            audit.record(
                call.caller,
                rpc,
                resource,
                outcome=outcome,
                request_id=_request_id(request, call),
                revision=getattr(response, "registry_revision", 0),
                version=_version(response),
            )


def _is_trial(request: Any, response: Any) -> bool:
    """Whether nothing was to be changed, or it was so before: replicas tell their base model again and again."""
    is_known = hasattr(response, "base_model") and not response.created
    return is_known or getattr(request, "validate_only", False)


def _request_id(request: Any, call: AuthorizedCall) -> str:
    """Which request it was for its caller, who may name it in a field or header; else one of ours."""
    named = dict(call.invocation_metadata() or ()).get(REQUEST_ID, "")
    for text in (getattr(request, "request_id", ""), named):
        if isinstance(text, str) and _ID.fullmatch(text):
            return text
    return str(uuid.uuid4())


def _version(response: Any) -> str:
    version = getattr(response, "version", None)
    return getattr(version, "name", "")
