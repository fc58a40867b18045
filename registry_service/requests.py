"""Reads requests: every wrong field becomes `InvalidArgument` here, before anything is looked up."""

import uuid
from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement

from loraplex.registry.v1 import registry_pb2, resources_pb2
from registry_service.checks import MAX_LABEL_CHARS, Checks, is_text
from registry_service.filter_fields import Compile, condition
from registry_service.filter_syntax import parse_filter
from registry_service.registration_rules import Registration
from registry_service.watch import WatchRequest, read_resume_token
from shared.digest import check_digest
from shared.errors import InvalidArgument
from shared.references import (
    ALL_NAMESPACES,
    MAX_VERSION,
    Reference,
    check_id,
    check_settable_alias,
    parse_base_model,
    parse_namespace_name,
    parse_reference,
)

MAX_ALIASES = 16
MAX_TARGETS = 16
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e9  # so that no sum of them is infinite and no share is lost in one


def registration(request: registry_pb2.RegisterAdapterRequest, own_namespace: str) -> Registration:
    """Every wrong field of a RegisterAdapter request at once, or the request."""
    checks = Checks()
    parent, base_model = request.parent, request.base_model
    namespace = checks.checked(lambda: parse_namespace_name(parent, "parent") if parent else own_namespace, "")
    adapter_id = checks.checked(lambda: check_id(request.adapter_id, "adapter_id"), "")
    base_model = checks.checked(lambda: parse_base_model(base_model, "base_model") if base_model else "", "")
    if not request.source.uri:
        checks.wrong("source.uri", "is required")
    if not is_text(request.source.credential_ref, MAX_LABEL_CHARS):
        checks.wrong("source.credential_ref", f"must be printable, at most {MAX_LABEL_CHARS} characters")
    checks.pairs("labels", request.labels, MAX_LABEL_CHARS)
    checks.description("description", request.description)
    _check_aliases(checks, request.aliases)
    request_id = checks.checked(lambda: _request_id(request.request_id), "")
    checks.finish()
    return Registration(
        namespace=namespace,
        adapter_id=adapter_id,
        base_model=base_model,
        source_uri=request.source.uri,
        credential_ref=request.source.credential_ref,
        labels=dict(request.labels),
        description=request.description,
        aliases=tuple(dict.fromkeys(request.aliases)),
        request_id=request_id,
        validate_only=request.validate_only,
    )


def _check_aliases(checks: Checks, aliases: Sequence[str]) -> None:
    if len(aliases) > MAX_ALIASES:
        checks.wrong("aliases", f"must not be more than {MAX_ALIASES}")
    for index, alias in enumerate(aliases[:MAX_ALIASES]):
        field = f"aliases[{index}]"
        checks.checked(lambda alias=alias, field=field: check_settable_alias(alias, field), "")  # type: ignore[misc]


def _request_id(text: str) -> str:
    if not text:
        return ""
    try:
        parsed = uuid.UUID(text)
    except ValueError:
        raise InvalidArgument.of("request_id", f"{text!r:.60} is not a UUID") from None
    if parsed.int == 0:
        raise InvalidArgument.of("request_id", "must not be the nil UUID")
    return str(parsed)


def adapter_reference(text: str, own_namespace: str, field: str) -> Reference:
    """A reference that names an adapter and no version of it."""
    reference = parse_reference(text, own_namespace, field)
    if reference.version is not None or reference.alias is not None or reference.digest is not None:
        raise InvalidArgument.of(field, f"must name an adapter without @ or a version, is {text!r:.200}")
    return reference


def alias_reference(text: str, own_namespace: str, field: str) -> Reference:
    """A reference that names an alias which may be set."""
    reference = parse_reference(text, own_namespace, field)
    if reference.alias is None:
        raise InvalidArgument.of(field, f"must name an alias, as in adapter@alias, is {text!r:.200}")
    check_settable_alias(reference.alias, field)
    return reference


def version_reference(text: str, own_namespace: str, field: str) -> Reference:
    """A reference that names one version: by number, digest or alias."""
    reference = parse_reference(text, own_namespace, field)
    if reference.version is None and reference.alias is None and reference.digest is None:
        raise InvalidArgument.of(field, f"must name a version, as in adapter@1, is {text!r:.200}")
    return reference


def numbered_version(text: str, own_namespace: str, field: str) -> Reference:
    """A reference that names one version by its number: what an alias means may change under the caller's hands."""
    reference = parse_reference(text, own_namespace, field)
    if reference.version is None:
        raise InvalidArgument.of(field, f"must name a version by its number, as in adapter@1, is {text!r:.200}")
    return reference


def alias_targets(targets: Sequence[resources_pb2.AliasTarget]) -> list[tuple[int, float]]:
    """[(version, weight)] of an alias: different versions, weights above zero."""
    checks = Checks()
    if not 1 <= len(targets) <= MAX_TARGETS:
        checks.wrong("targets", f"must be from 1 to {MAX_TARGETS} versions")
    found: dict[int, float] = {}
    for index, target in enumerate(targets[:MAX_TARGETS]):
        weight = target.weight if target.HasField("weight") else 1.0
        if not 1 <= target.version <= MAX_VERSION:
            checks.wrong(f"targets[{index}].version", f"must be from 1 to {MAX_VERSION}")
        if target.version in found:
            checks.wrong(f"targets[{index}].version", f"version {target.version} is there twice")
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            checks.wrong(f"targets[{index}].weight", f"must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        found[target.version] = weight
    checks.finish()
    return list(found.items())


def listed_namespace(parent: str, own_namespace: str) -> str:
    """The namespace to list; "" for all."""
    namespace = parse_namespace_name(parent, "parent", allow_all=True) if parent else own_namespace
    return "" if namespace == ALL_NAMESPACES else namespace


def watch(request: registry_pb2.WatchAdaptersRequest, own_namespace: str) -> WatchRequest:
    """Every wrong field of a WatchAdapters request at once, or the request."""
    checks = Checks()
    namespace = checks.checked(lambda: listed_namespace(request.parent, own_namespace), "")
    base_model = request.base_model
    base_model = checks.checked(lambda: parse_base_model(base_model, "base_model") if base_model else "", "")
    token = checks.checked(lambda: read_resume_token(request.resume_token), None)
    checks.finish()
    return WatchRequest(namespace, base_model, token, request.skip_snapshot, request.snapshot_wanted_only)


def filtered(text: str, fields: Mapping[str, Compile]) -> ColumnElement[bool] | None:
    """The condition that a list's filter means; None for all."""
    term = parse_filter(text)
    return None if term is None else condition(term, fields)


def fingerprint(text: str, field: str) -> str:
    """A fingerprint, or nothing."""
    return check_digest(text, field) if text else ""


def min_revision(value: int) -> int:
    """A revision to wait for; 0 for none."""
    if value < 0:
        raise InvalidArgument.of("min_revision", f"must not be negative, is {value}")
    return value
