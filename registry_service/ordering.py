"""`order_by`, and pages that begin after a key: stable whatever is inserted meanwhile.

Every order ends with what is unique, so that no two rows are alike in it.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, or_, tuple_

from registry_service.models import Adapter, AdapterVersion
from registry_service.pages import Key
from shared.errors import InvalidArgument

MAX_ORDER_CHARS = 500
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Term(NamedTuple):
    """One column of an order. `attribute` is its name in a row; `type` that of its value in a page token."""

    column: Any
    attribute: str
    type: type
    is_descending: bool = False


ADAPTER_COLUMNS = {
    "namespace": Term(Adapter.namespace, "namespace", str),
    "name": Term(Adapter.name, "name", str),
    "base_model": Term(Adapter.base_model, "base_model", str),
    "create_time": Term(Adapter.create_time, "create_time", datetime),
    "update_time": Term(Adapter.update_time, "update_time", datetime),
}
VERSION_COLUMNS = {
    "version": Term(AdapterVersion.number, "number", int),
    "create_time": Term(AdapterVersion.create_time, "create_time", datetime),
    "size_bytes": Term(AdapterVersion.size_bytes, "size_bytes", int),
    "digest": Term(AdapterVersion.digest, "digest", str),
}
BY_NAME = (ADAPTER_COLUMNS["namespace"], ADAPTER_COLUMNS["name"])
NEWEST_FIRST = (VERSION_COLUMNS["version"]._replace(is_descending=True),)


class Order(NamedTuple):
    """The columns to sort by, most significant first."""

    terms: tuple[Term, ...]

    @property
    def key_types(self) -> list[type]:
        """Types of the parts of a key in a page token."""
        return [int if term.type is datetime else term.type for term in self.terms]

    @property
    def columns(self) -> list[Any]:
        """For ORDER BY."""
        return [term.column.desc() if term.is_descending else term.column.asc() for term in self.terms]

    def key(self, row: object) -> Key:
        """What comes after `row` comes after this key."""
        return [_encoded(getattr(row, term.attribute)) for term in self.terms]

    def after(self, key: Sequence[Any]) -> ColumnElement[bool]:
        """True for the rows that come after a key."""
        values = [_decoded(part, term.type) for part, term in zip(key, self.terms, strict=True)]
        if not any(term.is_descending for term in self.terms):
            return tuple_(*(term.column for term in self.terms)) > tuple_(*values)  # one range of an index
        first, start = self.terms[0], values[0]
        # Implied by what follows, for the sake of an index.
        begin = first.column <= start if first.is_descending else first.column >= start
        alternatives: list[ColumnElement[bool]] = []
        equal: list[ColumnElement[bool]] = []
        for term, value in zip(self.terms, values, strict=True):
            alternatives.append(and_(*equal, term.column < value if term.is_descending else term.column > value))
            equal.append(term.column == value)
        return and_(begin, or_(*alternatives))


def parse_order(text: str, columns: Mapping[str, Term], default: tuple[Term, ...]) -> Order:
    """The order of `order_by`, such as `create_time desc, name`, with `default` behind it.

    Raises:
        InvalidArgument: on `order_by`.
    """
    if len(text) > MAX_ORDER_CHARS:
        raise InvalidArgument.of("order_by", f"is longer than {MAX_ORDER_CHARS} characters")
    terms = [_term(part.split(), columns) for part in text.split(",")] if text.strip() else []
    named = [term.attribute for term in terms]
    if len(set(named)) < len(named):
        raise InvalidArgument.of("order_by", "names a field twice")
    return Order((*terms, *(term for term in default if term.attribute not in named)))


def _term(words: list[str], columns: Mapping[str, Term]) -> Term:
    match words:
        case [name] | [name, "asc" | "desc"] if name in columns:
            return columns[name]._replace(is_descending=words[1:] == ["desc"])
    expected = f"FIELD [asc|desc], …, fields are {', '.join(columns)}"
    raise InvalidArgument.of("order_by", f"{' '.join(words)!r:.80} is not of {expected}")


def _encoded(value: Any) -> Any:
    return (value - _EPOCH) // timedelta(microseconds=1) if isinstance(value, datetime) else value


def _decoded(part: Any, kind: type) -> Any:
    return _EPOCH + timedelta(microseconds=part) if kind is datetime else part
