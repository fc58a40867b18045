"""Who calls, and what they may do. The same rules serve both services.

Without authentication everybody is the namespace `default` with every role, and no other namespace exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shared.errors import AdapterNotFound, PermissionDenied

Role = Literal["reader", "writer", "admin", "replica"]
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True)
class Caller:
    """An authenticated caller: a name for logs, its own namespace, and its roles by namespace."""

    name: str
    namespace: str
    roles: dict[str, frozenset[Role]]


ANONYMOUS = Caller(
    "anonymous", DEFAULT_NAMESPACE, {DEFAULT_NAMESPACE: frozenset(["reader", "writer", "admin", "replica"])}
)


def caller_of(metadata: Sequence[tuple[str, str | bytes]] | None) -> Caller:
    """The caller behind a call's metadata."""
    return ANONYMOUS


def authorize(caller: Caller, namespace: str, role: Role) -> None:
    """Returns if `caller` has `role` in `namespace`.

    Raises:
        AdapterNotFound: it has no role there, so nothing in that namespace exists for it.
        PermissionDenied: it has a role there, but not this one.
    """
    roles = caller.roles.get(namespace)
    if not roles:
        raise AdapterNotFound(
            f"namespace {namespace!r} holds no adapter you may see", metadata={"namespace": namespace}
        )
    if role not in roles:
        raise PermissionDenied(f"this needs the role {role} in namespace {namespace}", metadata={"role": role})
