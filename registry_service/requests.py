"""Reads requests: every wrong field becomes `InvalidArgument` here, before anything is looked up."""

import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from loraplex.registry.v1 import registry_pb2, resources_pb2
from registry_service.registration import Registration
from shared.digest import check_digest
from shared.errors import FieldViolation, InvalidArgument, Unimplemented
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

MAX_LABELS = 64
MAX_LABEL_CHARS = 255
MAX_DESCRIPTION_CHARS = 4096
MAX_ALIASES = 16

T = TypeVar("T")

_LABEL = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?")


class _Checks:
    """Runs checks and keeps what each of them says is wrong."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def wrong(self, field: str, description: str) -> None:
        self.violations.append(FieldViolation(field, description))

    def checked(self, check: Callable[[], T], default: T) -> T:
        try:
            return check()
        except InvalidArgument as error:
            self.violations.extend(error.violations)
            return default

    def finish(self) -> None:
        if self.violations:
            raise InvalidArgument(self.violations)


def registration(request: registry_pb2.RegisterAdapterRequest, own_namespace: str) -> Registration:
    """Every wrong field of a RegisterAdapter request at once, or the request."""
    checks = _Checks()
    parent, base_model = request.parent, request.base_model
    namespace = checks.checked(lambda: parse_namespace_name(parent, "parent") if parent else own_namespace, "")
    adapter_id = checks.checked(lambda: check_id(request.adapter_id, "adapter_id"), "")
    base_model = checks.checked(lambda: parse_base_model(base_model, "base_model") if base_model else "", "")
    if not request.source.uri:
        checks.wrong("source.uri", "is required")
    if not _is_text(request.source.credential_ref, MAX_LABEL_CHARS):
        checks.wrong("source.credential_ref", f"must be printable, at most {MAX_LABEL_CHARS} characters")
    _check_texts(checks, request.labels, request.description)
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


def _check_texts(checks: _Checks, labels: Mapping[str, str], description: str) -> None:
    if len(labels) > MAX_LABELS:
        checks.wrong("labels", f"must not be more than {MAX_LABELS}")
    for key, value in list(labels.items())[:MAX_LABELS]:
        if not _LABEL.fullmatch(key) or not _is_text(value, MAX_LABEL_CHARS):
            expected = f"keys are 1 to 63 of A-Z a-z 0-9 . _ / -, values printable and at most {MAX_LABEL_CHARS}"
            checks.wrong(f"labels[{key[:100]!r}]", f"{expected} characters")
    if not _is_text(description.replace("\n", " ").replace("\t", " "), MAX_DESCRIPTION_CHARS):
        checks.wrong("description", f"must be printable, at most {MAX_DESCRIPTION_CHARS} characters")


def _check_aliases(checks: _Checks, aliases: Sequence[str]) -> None:
    if len(aliases) > MAX_ALIASES:
        checks.wrong("aliases", f"must not be more than {MAX_ALIASES}")
    for index, alias in enumerate(aliases[:MAX_ALIASES]):
        field = f"aliases[{index}]"
        checks.checked(lambda alias=alias, field=field: check_settable_alias(alias, field), "")  # type: ignore[misc]


def _is_text(text: str, limit: int) -> bool:
    return len(text) <= limit and text.isprintable()


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


def single_target(targets: Sequence[resources_pb2.AliasTarget]) -> tuple[int, float]:
    """(version, weight) of an alias's only target."""
    if not targets:
        raise InvalidArgument.of("targets", "must name a version")
    for index, target in enumerate(targets):
        if not 1 <= target.version <= MAX_VERSION:
            raise InvalidArgument.of(f"targets[{index}].version", f"must be from 1 to {MAX_VERSION}")
        if target.HasField("weight") and not (0 < target.weight < math.inf):
            raise InvalidArgument.of(f"targets[{index}].weight", "must be a finite number above zero")
    if len(targets) > 1:
        raise Unimplemented("SetAdapterAlias with more than one target is not built yet")
    return targets[0].version, targets[0].weight if targets[0].HasField("weight") else 1.0


def listed_namespace(parent: str, own_namespace: str) -> str:
    """The namespace to list; "" for all."""
    namespace = parse_namespace_name(parent, "parent", allow_all=True) if parent else own_namespace
    return "" if namespace == ALL_NAMESPACES else namespace


def refuse_filter(text: str, order_by: str) -> None:
    """Filters and orders are in the contract and not built yet."""
    for field, value in (("filter", text), ("order_by", order_by)):
        if value:
            raise Unimplemented(f"ListAdapters with {field} is not built yet")


def fingerprint(text: str, field: str) -> str:
    """A fingerprint, or nothing."""
    return check_digest(text, field) if text else ""


def min_revision(value: int) -> int:
    """A revision to wait for; 0 for none."""
    if value < 0:
        raise InvalidArgument.of("min_revision", f"must not be negative, is {value}")
    return value
