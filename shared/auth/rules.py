"""Who may call what: for every RPC of both services the roles that let in, and where they must be held.

`RULES` is the only place that says so. `shared.auth.gate` applies it before a handler runs, and an RPC that is not
listed is refused. A rule's `scope` reads the namespace out of the request, nothing is looked up for it.
"""

from typing import Any, NamedTuple, Protocol

from shared.auth.caller import Caller, Role, authorize, role_missing
from shared.blend_errors import of_part
from shared.references import ALL_NAMESPACES, parse_namespace_name, parse_reference


class Scope(Protocol):
    """Where the roles of a rule must be held."""

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        """Raises what `shared.auth.authorize` does; InvalidArgument if the request's name cannot be read."""

    def resource(self, caller: Caller, request: Any) -> str:
        """What a request that `check` has seen is about, for the audit log."""


class Named(NamedTuple):
    """In the namespace of the adapter that `field` refers to; in the caller's own if it may be and is empty."""

    field: str
    is_optional: bool = False

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        text = _value(request, self.field)
        if not text and self.is_optional:
            return authorize(caller, caller.namespace, roles)
        reference = parse_reference(text, caller.namespace, self.field)
        return authorize(caller, reference.namespace, roles, reference.adapter)

    def resource(self, caller: Caller, request: Any) -> str:
        return parse_reference(_value(request, self.field), caller.namespace, self.field).canonical()


class NamedOrBlend(Named):
    """As `Named`, and in the namespaces of all adapters that `blend` refers to."""

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        super().check(caller, roles, request)
        for index, part in enumerate(request.blend):
            reference = parse_reference(part.reference, caller.namespace, f"blend[{index}].reference")
            with of_part(f"blend[{index}]"):
                authorize(caller, reference.namespace, roles, reference.adapter)


class NamedOrDigest(Named):
    """As `Named`; in some namespace if `field` is a digest, and then the handler looks whose content it is."""

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        text = _value(request, self.field)
        if text.startswith("sha256:"):
            return _Anywhere().check(caller, roles, request)
        return super().check(caller, roles, request)

    def resource(self, caller: Caller, request: Any) -> str:
        text = _value(request, self.field)
        return text[:80] if text.startswith("sha256:") else super().resource(caller, request)


class InParent(NamedTuple):
    """In the namespace `parent`, by default the caller's own; `-` is every one that it has the role in.

    `adapter_field` names an adapter to be made in there.
    """

    adapter_field: str = ""

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        namespace = self._namespace(caller, request)
        if namespace == ALL_NAMESPACES:
            return _Anywhere().check(caller, roles, request)
        return authorize(caller, namespace, roles, _value(request, self.adapter_field)[:_LONGEST_ID])

    def resource(self, caller: Caller, request: Any) -> str:
        return f"{self._namespace(caller, request)}/{_value(request, self.adapter_field)[:_LONGEST_ID]}"

    def _namespace(self, caller: Caller, request: Any) -> str:
        parent = request.parent
        return parse_namespace_name(parent, "parent", allow_all=not self.adapter_field) if parent else caller.namespace


class _Anywhere(NamedTuple):
    """In some namespace: what is asked for belongs to none, or only what belongs to the caller's is answered."""

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        if not caller.has_anywhere(roles):
            raise role_missing(roles, "a namespace")

    def resource(self, caller: Caller, request: Any) -> str:
        return ""


class _Everywhere(NamedTuple):
    """In every namespace (`*`): what is asked for concerns all of them. `field` names it in the audit log."""

    field: str = ""

    def check(self, caller: Caller, roles: frozenset[Role], request: Any) -> None:
        if not caller.has_everywhere(roles):
            raise role_missing(roles, "every namespace (*)")

    def resource(self, caller: Caller, request: Any) -> str:
        return str(_value(request, self.field))[:80]


class Rule(NamedTuple):
    """`roles`: any one lets in. `is_change`: goes to the audit log. `is_endless`: a stream that ends with the right.

    `is_periodic`: replicas call it by themselves, again and again; it is traced only where its caller traces.
    """

    roles: frozenset[Role]
    scope: Scope
    is_change: bool = False
    is_endless: bool = False
    is_periodic: bool = False


def _rule(
    *roles: Role, scope: Scope, is_change: bool = False, is_endless: bool = False, is_periodic: bool = False
) -> Rule:
    return Rule(frozenset(roles), scope, is_change, is_endless, is_periodic)


def _value(request: Any, field: str) -> Any:
    for part in field.split("."):
        request = getattr(request, part) if part else ""
    return request


_LONGEST_ID = 63
_REGISTRY = "/loraplex.registry.v1.AdapterRegistryService/"
_INFERENCE = "/loraplex.inference.v1.InferenceService/"
_CONTROL = "/loraplex.inference.v1.AdapterControlService/"
_ADAPTER, _ANYWHERE = Named("adapter", is_optional=True), _Anywhere()

# fmt: off
RULES: dict[str, Rule] = {
    _REGISTRY + "RegisterAdapter":      _rule("writer", scope=InParent("adapter_id"), is_change=True),
    _REGISTRY + "ResolveAdapter":       _rule("reader", "replica", scope=Named("reference")),
    _REGISTRY + "WatchAdapters":        _rule("reader", "replica", scope=InParent(), is_endless=True),
    _REGISTRY + "GetAdapter":           _rule("reader", scope=Named("name")),
    _REGISTRY + "ListAdapters":         _rule("reader", scope=InParent()),
    _REGISTRY + "UpdateAdapter":        _rule("writer", scope=Named("adapter.name"), is_change=True),
    _REGISTRY + "DeleteAdapter":        _rule("writer", scope=Named("name"), is_change=True),
    _REGISTRY + "UndeleteAdapter":      _rule("writer", scope=Named("name"), is_change=True),
    _REGISTRY + "GetAdapterVersion":    _rule("reader", scope=Named("name")),
    _REGISTRY + "ListAdapterVersions":  _rule("reader", scope=Named("parent")),
    _REGISTRY + "DeleteAdapterVersion": _rule("writer", scope=Named("name"), is_change=True),
    _REGISTRY + "SetAdapterAlias":      _rule("writer", scope=Named("name"), is_change=True),
    _REGISTRY + "DeleteAdapterAlias":   _rule("writer", scope=Named("name"), is_change=True),
    _REGISTRY + "RegisterBaseModel":    _rule("replica", "admin", scope=_Everywhere("id"), is_change=True, is_periodic=True),  # noqa: E501 - a row of the table
    _REGISTRY + "GetBaseModel":         _rule("reader", "replica", scope=_ANYWHERE),
    _REGISTRY + "ListBaseModels":       _rule("reader", "replica", scope=_ANYWHERE),
    _REGISTRY + "ReportReplicaState":   _rule("replica", scope=_Everywhere("replica"), is_periodic=True),
    _REGISTRY + "ListReplicas":         _rule("operator", "replica", scope=_Everywhere()),
    _INFERENCE + "Generate":            _rule("reader", scope=NamedOrBlend("adapter", is_optional=True)),
    _INFERENCE + "GetModelInfo":        _rule("reader", scope=_ANYWHERE),
    _INFERENCE + "Tokenize":            _rule("reader", scope=_ADAPTER),
    _INFERENCE + "Detokenize":          _rule("reader", scope=_ADAPTER),
    _CONTROL + "LoadAdapter":           _rule("operator", scope=Named("reference"), is_change=True),
    _CONTROL + "UnloadAdapter":         _rule("operator", scope=NamedOrDigest("adapter"), is_change=True),
    _CONTROL + "ListLoadedAdapters":    _rule("operator", scope=_ANYWHERE),
    _CONTROL + "GetReplicaStatus":      _rule("operator", scope=_ANYWHERE),
}
# fmt: on
