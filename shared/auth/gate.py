"""The gate before every handler: authenticate, count, authorize by `RULES`, run the handler, write the audit log."""

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
from shared.auth.tenant_calls import TenantCalls
from shared.call_ends import cut_off_reason
from shared.errors import LoraplexError, PermissionDenied

RECHECK_SECONDS = 5.0
REQUEST_ID = "x-request-id"
_OWN = "/loraplex."
_ID = re.compile(r"[\w.:@/+=-]{1,128}")

Refusals = Callable[[str, Any, "AuthorizedCall", LoraplexError], None]  # name of the RPC, request, context, why


class AuthorizedCall:
    """The context of a call that passed the gate: gRPC's own, and who calls. `is_change`: see `changed_nothing`."""

    def __init__(self, context: Any, caller: Caller) -> None:
        self.caller = caller
        self.is_change = True
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class AccessGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Handlers of ours run only for callers that `RULES` lets in. Health and reflection are open to everybody.

    `calls`: how many of them a tenant may make; by default any number. `refusals`: hears of each stream of a known
    caller that is refused before its handler runs, which else could tell of it; must not raise.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        calls: TenantCalls | None = None,
        refusals: Refusals = lambda rpc, request, call, error: None,
    ) -> None:
        self._authenticator = authenticator
        self._calls = calls or TenantCalls()
        self._refusals = refusals

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
            self._calls.begin(caller, context)
            if rule is None or not rule.is_change:
                _admit(caller, rule, request, rpc)
                return await behaviour(request, AuthorizedCall(context, caller))
            return await _audited(behaviour, request, AuthorizedCall(context, caller), rule, rpc)

        return handle

    def _stream(self, behaviour: Any, rule: Rule | None, rpc: str) -> Any:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            caller = self._authenticate(context)
            call = AuthorizedCall(context, caller)
            try:
                self._calls.begin(caller, context)
                _admit(caller, rule, request, rpc)
            except LoraplexError as error:
                self._refusals(rpc, request, call, error)
                raise
            checked_at = time.monotonic()
            async with aclosing(behaviour(request, call)) as responses:
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
        outcome = cut_off_reason(call)
        raise
    finally:
        if call.is_change and not getattr(request, "validate_only", False):
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
                change=audit.change_of(request),
            )


def _request_id(request: Any, call: AuthorizedCall) -> str:
    """Which request it was for its caller, who may name it in a field or header; else one of ours."""
    named = getattr(request, "request_id", "")
    return named if _ID.fullmatch(named) else named_request_id(call) or str(uuid.uuid4())


def named_request_id(context: Any) -> str:
    """The id in the header `x-request-id`; empty if there is none that can be used."""
    named = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
    return named if isinstance(named, str) and _ID.fullmatch(named) else ""


def _version(response: Any) -> str:
    version = getattr(response, "version", None)
    return getattr(version, "name", "")
