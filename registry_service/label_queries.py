"""SQL for labels and annotations: what an index answers where the database has one for any key."""

from typing import Any

from sqlalchemy import Boolean, ColumnElement
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class has_pair(FunctionElement[bool]):  # noqa: N801  # a function, as SQLAlchemy names them
    """`has_pair(object, key, value)`: whether a JSON object that is not null has this text under this key."""

    name = "has_pair"
    type = Boolean()
    inherit_cache = True


class has_key(FunctionElement[bool]):  # noqa: N801
    """`has_key(object, key)`: whether a JSON object that is not null has this key."""

    name = "has_key"
    type = Boolean()
    inherit_cache = True


@compiles(has_pair)
def _pair(element: has_pair, compiler: SQLCompiler, **options: Any) -> str:
    column, key, value = _arguments(element, compiler, options)
    return f"coalesce(json_extract({column}, '$.' || json_quote({key})) = {value}, 0)"


@compiles(has_pair, "postgresql")
def _pair_on_postgres(element: has_pair, compiler: SQLCompiler, **options: Any) -> str:
    column, key, value = _arguments(element, compiler, options)
    return f"({column} @> jsonb_build_object({key}, {value}))"


@compiles(has_key)
def _key(element: has_key, compiler: SQLCompiler, **options: Any) -> str:
    column, key = _arguments(element, compiler, options)
    return f"(json_type({column}, '$.' || json_quote({key})) IS NOT NULL)"


@compiles(has_key, "postgresql")
def _key_on_postgres(element: has_key, compiler: SQLCompiler, **options: Any) -> str:
    column, key = _arguments(element, compiler, options)
    return f"({column} ? {key})"


def _arguments(element: FunctionElement[bool], compiler: SQLCompiler, options: dict[str, Any]) -> list[str]:
    clauses: list[ColumnElement[Any]] = list(element.clauses)
    return [compiler.process(clause, **options) for clause in clauses]
