"""A caller, its roles, and the two ways of saying no."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shared.errors import AdapterNotFound, PermissionDenied
from shared.references import adapter_name, namespace_name

Role = Literal["reader", "writer", "operator", "admin", "replica"]
Credential = Literal["none", "token", "jwt", "certificate"]

ROLES: frozenset[Role] = frozenset(get_args(Role))
INCLUDED: dict[Role, frozenset[Role]] = {
    "reader": frozenset(["reader"]),
    "writer": frozenset(["writer", "reader"]),
    "operator": frozenset(["operator", "reader"]),
    "admin": frozenset(["admin", "operator", "writer", "reader"]),
    "replica": frozenset(["replica"]),
}
DEFAULT_NAMESPACE = "default"
EVERY_NAMESPACE = "*"


@dataclass(frozen=True)
class Caller:
    """An authenticated caller.

    `name` is for logs and scopes request ids. `namespace` is meant where a request names none, and is the tenant it is
    served for. `roles` by namespace, with the roles that they include; those under `*` hold in every namespace.
    """

    name: str
    namespace: str
    roles: Mapping[str, frozenset[Role]]
    credential: Credential = "none"

    def roles_in(self, namespace: str) -> frozenset[Role]:
        """Its roles in one namespace; without any, nothing in there exists for it."""
        return self.roles.get(namespace, frozenset()) | self.roles.get(EVERY_NAMESPACE, frozenset())

    def has_anywhere(self, roles: Iterable[Role]) -> bool:
        """Whether it has one of the roles in some namespace."""
        wanted = frozenset(roles)
        return any(held & wanted for held in self.roles.values())

    def has_everywhere(self, roles: Iterable[Role]) -> bool:
        """Whether it has one of the roles in whatever exists."""
        held = self.roles.get(self.namespace if self.credential == "none" else EVERY_NAMESPACE, frozenset())
        return not held.isdisjoint(roles)

    def namespaces(self, roles: Iterable[Role]) -> frozenset[str] | None:
        """Where it has one of the roles; None for everywhere."""
        wanted = frozenset(roles)
        found = frozenset(namespace for namespace, held in self.roles.items() if held & wanted)
        return None if EVERY_NAMESPACE in found else found


ANONYMOUS = Caller("anonymous", DEFAULT_NAMESPACE, {DEFAULT_NAMESPACE: ROLES})


def granted(namespaces: Iterable[str], roles: Iterable[Role]) -> dict[str, frozenset[Role]]:
    """`Caller.roles` for these roles in these namespaces. A replica serves every namespace, whatever is listed."""
    roles = frozenset(roles)
    found: dict[str, frozenset[Role]] = {}
    local = frozenset[Role]().union(*(INCLUDED[role] for role in roles - {"replica"}))
    if local:
        found = dict.fromkeys(namespaces, local)
    if "replica" in roles:
        found[EVERY_NAMESPACE] = found.get(EVERY_NAMESPACE, frozenset()) | INCLUDED["replica"]
    return found


def own_namespace(namespaces: Iterable[str]) -> str:
    """The first that is one; `default` if there is none."""
    return next((namespace for namespace in namespaces if namespace != EVERY_NAMESPACE), DEFAULT_NAMESPACE)


def caller_of(context: Any) -> Caller:
    """Who makes the call that a handler was given this context for, by `shared.auth.gate`."""
    caller: Caller = context.caller
    return caller


def changed_nothing(context: Any) -> None:
    """Of a call that might have changed something: all was so before, and it is not written to the audit log."""
    context.is_change = False


def authorize(caller: Caller, namespace: str, role: Role | Iterable[Role], adapter: str = "") -> None:
    """Returns if `caller` has `role`, or one of them, in `namespace`, where it asks for `adapter` if for any.

    Raises:
        AdapterNotFound: it has no role there, so nothing in there exists for it: the error of a missing adapter.
        PermissionDenied: it has a role there, but not this one.
    """
    held = caller.roles_in(namespace)
    if not held:
        raise no_adapter(namespace, adapter) if adapter else no_namespace(namespace)
    wanted = {role} if isinstance(role, str) else set(role)
    if held.isdisjoint(wanted):
        raise role_missing(wanted, f"namespace {namespace}")


def role_missing(roles: Iterable[str], where: str) -> PermissionDenied:
    """The error for a role that is too small."""
    text = " or ".join(sorted(roles))
    return PermissionDenied(f"this needs the role {text} in {where}", metadata={"role": text})


def no_adapter(namespace: str, name: str) -> AdapterNotFound:
    """The error for an adapter that is not there, or not there for this caller."""
    resource = adapter_name(namespace, name)
    return AdapterNotFound(f"there is no adapter {resource}", metadata={"adapter": resource})


def no_namespace(namespace: str) -> AdapterNotFound:
    """The same, where no adapter is named."""
    resource = namespace_name(namespace)
    return AdapterNotFound(f"there is no adapter in {resource} that you may see", metadata={"namespace": resource})
