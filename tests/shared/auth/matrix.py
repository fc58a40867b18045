"""What `RULES` promises a caller, worked out from the roles it was granted. For tests of both services."""

from collections.abc import Iterable

import grpc

from shared.auth.rules import RULES, InParent, Named, Rule
from shared.status import from_rpc_error
from tests.shared.auth.token_files import CALLERS, token

# What each granted role lets its holder do, written down once more.
HOLDS = {
    "reader": {"reader"},
    "writer": {"reader", "writer"},
    "operator": {"reader", "operator"},
    "admin": {"reader", "writer", "operator", "admin"},
    "replica": {"replica"},
}


def methods(service: str) -> dict[str, Rule]:
    """The rules of one service, by RPC."""
    return {method.rpartition("/")[2]: rule for method, rule in RULES.items() if method.split("/")[1] == service}


def expected(rule: Rule, caller: str, namespace: str) -> str:
    """PASS, or the reason with which the call of an RPC on something in `namespace` is refused."""
    roles, namespaces = CALLERS[caller]
    held = set().union(*(HOLDS[role] for role in roles))
    is_global = namespaces == ["*"] or "replica" in roles
    if isinstance(rule.scope, (Named, InParent)):
        if not is_global and namespace not in namespaces:
            return "ADAPTER_NOT_FOUND"
        return "PASS" if held & rule.roles else "PERMISSION_DENIED"
    is_everywhere = type(rule.scope).__name__ == "_Everywhere"
    return "PASS" if held & rule.roles and (is_global or not is_everywhere) else "PERMISSION_DENIED"


def bearer(caller: str) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(("authorization", f"Bearer {token(caller)}"))


async def outcome(rpc, request, metadata=None) -> str:
    """PASS if the handler ran, whatever it said of the request; else the reason."""
    call = rpc(request, metadata=metadata, timeout=20)
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        reason = from_rpc_error(error).reason
        return reason if reason in ("ADAPTER_NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED") else "PASS"
    return "PASS"


def every(rules: Iterable[str], namespaces: Iterable[str]) -> list[tuple[str, str, str]]:
    """RPC × caller × namespace."""
    return [(rpc, caller, namespace) for rpc in rules for caller in CALLERS for namespace in namespaces]
