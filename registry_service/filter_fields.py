"""What list filters can compare, and the SQL that it becomes: expressions with bound values, never text.

A comparison with something that is not there (a label, a time) is false, and its negation true.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, false, func, literal, not_, or_, select
from sqlalchemy.orm import aliased

from registry_service.filter_syntax import All, AnyOf, Comparison, Not, Term, Value, wrong
from registry_service.label_queries import has_key, has_pair
from registry_service.models import DELETED, DEPRECATED, READY, Adapter, AdapterVersion, Alias

EMPTY = "EMPTY"  # state of an adapter without a live version
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_KEY = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?")
_ORDERED: dict[str, Callable[[Any, Any], ColumnElement[bool]]] = {
    "=": lambda column, value: column == value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
}

Compile = Callable[[Comparison], ColumnElement[bool]]


@dataclass(frozen=True, eq=False)
class _Text:
    """`=` is equality, or a prefix where the value ends with `*`; `:` finds a part, whatever its case."""

    column: Any
    prefix: str = ""  # that may be written before the value

    def __call__(self, comparison: Comparison) -> ColumnElement[bool]:
        _check_operator(comparison, "=", ":")
        text = comparison.value.text.removeprefix(self.prefix)
        if comparison.operator == ":":
            return _contains(self.column, text)
        if text.endswith("*"):
            return func.substr(self.column, 1, len(text) - 1) == text[:-1]
        return _truth(self.column == text)


@dataclass(frozen=True, eq=False)
class _Enum:
    column: Any
    values: tuple[str, ...]

    def __call__(self, comparison: Comparison) -> ColumnElement[bool]:
        _check_operator(comparison, "=")
        if comparison.value.text not in self.values:
            raise wrong(comparison.value.position, f"{comparison.field} is one of {', '.join(self.values)}")
        return _truth(self.column == comparison.value.text)


@dataclass(frozen=True, eq=False)
class _Number:
    column: Any

    def __call__(self, comparison: Comparison) -> ColumnElement[bool]:
        _check_operator(comparison, *_ORDERED)
        if not _INTEGER.fullmatch(comparison.value.text):
            raise wrong(comparison.value.position, f"{comparison.field} is compared with a whole number")
        return _ORDERED[comparison.operator](self.column, int(comparison.value.text))


@dataclass(frozen=True, eq=False)
class _Time:
    column: Any

    def __call__(self, comparison: Comparison) -> ColumnElement[bool]:
        _check_operator(comparison, *_ORDERED)
        return _truth(_ORDERED[comparison.operator](self.column, _time(comparison.value)))


@dataclass(frozen=True, eq=False)
class _Map:
    """`labels.KEY = value`, `labels.KEY:part`, `labels.KEY:*` and `labels:KEY`: whether there is the key."""

    column: Any

    def __call__(self, comparison: Comparison) -> ColumnElement[bool]:
        key = comparison.key
        if not key:
            _check_operator(comparison, ":")
            return self._has(comparison.value.text, comparison.value.position)
        if comparison.operator == ":" and comparison.value.text == "*":
            return self._has(key, comparison.position)
        _check_key(key, comparison.position)
        value = comparison.value.text
        if comparison.operator == "=" and not value.endswith("*"):
            return has_pair(self.column, literal(key), literal(value))
        return _Text(self.column[key].as_string())(comparison)

    def _has(self, key: str, position: int) -> ColumnElement[bool]:
        _check_key(key, position)
        return has_key(self.column, literal(key))


def _check_key(key: str, position: int) -> None:
    if not _KEY.fullmatch(key):
        raise wrong(position, f"{key!r:.80} is no key: 1 to 63 of A-Z a-z 0-9 . _ / -")


def _aliases(comparison: Comparison) -> ColumnElement[bool]:
    """`aliases:NAME`: whether the adapter has the alias."""
    _check_operator(comparison, ":")
    return exists(select(Alias.name).where(Alias.adapter_uid == Adapter.uid, Alias.name == comparison.value.text))


# Other versions than those that a query is about.
_other = aliased(AdapterVersion)
_live = (_other.adapter_uid == Adapter.uid, _other.state != DELETED)
_latest = func.coalesce(select(func.max(_other.number)).where(*_live).correlate(Adapter).scalar_subquery(), 0)
_state = case(
    (Adapter.delete_time.is_not(None), DELETED),
    (exists(select(_other.uid).where(*_live).correlate(Adapter)), READY),
    else_=EMPTY,
)

ADAPTER_FIELDS: dict[str, Compile] = {
    "name": _Text(Adapter.name),
    "namespace": _Text(Adapter.namespace, "namespaces/"),
    "uid": _Text(Adapter.uid),
    "base_model": _Text(Adapter.base_model, "baseModels/"),
    "default_alias": _Text(Adapter.default_alias),
    "description": _Text(Adapter.description),
    "labels": _Map(Adapter.labels),
    "annotations": _Map(Adapter.annotations),
    "aliases": _aliases,
    "latest_version": _Number(_latest),
    "residency": _Enum(Adapter.residency, ("ON_DEMAND", "PRELOAD", "PINNED")),
    "state": _Enum(_state, (READY, EMPTY, DELETED)),
    "create_time": _Time(Adapter.create_time),
    "update_time": _Time(Adapter.update_time),
    "delete_time": _Time(Adapter.delete_time),
}
VERSION_FIELDS: dict[str, Compile] = {
    "version": _Number(AdapterVersion.number),
    "uid": _Text(AdapterVersion.uid),
    "digest": _Text(AdapterVersion.digest),
    "creator": _Text(AdapterVersion.creator),
    "source": _Text(AdapterVersion.source["uri"].as_string()),
    "rank": _Number(AdapterVersion.lora_config["rank"].as_integer()),
    "size_bytes": _Number(AdapterVersion.size_bytes),
    "num_tensors": _Number(AdapterVersion.num_tensors),
    "state": _Enum(AdapterVersion.state, (READY, DEPRECATED, DELETED)),
    "create_time": _Time(AdapterVersion.create_time),
    "delete_time": _Time(AdapterVersion.delete_time),
}


def condition(term: Term, fields: Mapping[str, Compile]) -> ColumnElement[bool]:
    """The expression that is true for what the filter wants.

    Raises:
        InvalidArgument: on `filter`, with the position: there is no such field, or it is not compared like that.
    """
    match term:
        case All(terms):
            return and_(*(condition(each, fields) for each in terms))
        case AnyOf(terms):
            return or_(*(condition(each, fields) for each in terms))
        case Not(inner):
            return not_(condition(inner, fields))
    field = fields.get(term.field)
    if field is None:
        raise wrong(term.position, f"there is no field {term.field!r:.40}; there are {', '.join(fields)}")
    if term.key and not isinstance(field, _Map):
        raise wrong(term.position, f"{term.field} has no fields")
    if term.operator == "!=":
        return not_(field(term._replace(operator="=")))
    return field(term)


def _check_operator(comparison: Comparison, *allowed: str) -> None:
    if comparison.operator not in allowed:
        also = ["!="] if "=" in allowed else []
        raise wrong(comparison.position, f"{comparison.field} is compared by {' '.join([*allowed, *also])}")


def _truth(expression: ColumnElement[bool]) -> ColumnElement[bool]:
    """False where SQL has NULL, so that its negation is true."""
    return func.coalesce(expression, false())


def _contains(column: Any, text: str) -> ColumnElement[bool]:
    escaped = re.sub(r"([\\%_])", r"\\\1", text)
    return _truth(func.lower(column).like(func.lower(f"%{escaped}%"), escape="\\"))


def _time(value: Value) -> datetime:
    try:
        time = datetime.fromisoformat(value.text)
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise wrong(value.position, f"{value.text!r:.40} is not a time such as 2026-01-31T09:00:00Z")
