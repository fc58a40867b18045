"""`export` and `restore`: everything that was registered as JSON lines, whichever of the databases it lies in.

    {"format": "loraplex-registry", "schema": "0006"}
    {"table": "base_models", "row": {…}}                 every row, those that others refer to first
    {"end": 5}                                           the number of rows

Not exported is what is not for long: replicas, answers to request ids, the change log. A restored database lives its
own life (it has a new epoch), so that watches of the old one begin anew.
"""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

from sqlalchemy import Connection, Table, func, insert, select, update
from sqlalchemy.exc import DBAPIError, OperationalError

from registry_service import migrations
from registry_service.command_engine import command_engine
from registry_service.database import is_sqlite
from registry_service.models import (
    Adapter,
    AdapterVersion,
    Alias,
    AliasTarget,
    BaseModel,
    PreviousAliasTarget,
    RegistryState,
    Tombstone,
    UtcDateTime,
)
from shared.errors import FailedPrecondition, InvalidArgument, RegistryUnavailable

FORMAT = "loraplex-registry"
SAME_ROWS = ("0003", "0004", "0005")  # schemas of before whose rows are as today's; tables that they lack stay empty
_ROWS_TOGETHER = 500
_TABLES: dict[str, Table] = {
    model.__tablename__: model.__table__  # type: ignore[misc]  # a Table, as of every mapped class here
    for model in (RegistryState, BaseModel, Tombstone, Adapter, AdapterVersion, Alias, AliasTarget, PreviousAliasTarget)
}


def export(url: str, output: TextIO) -> int:
    """Writes what the database at `url` holds at one moment. How many rows that are. Blocks.

    Raises:
        InvalidArgument: there is no SQLite database at that path.
        SchemaOutdated: the database is of another version.
        RegistryUnavailable: no database answers.
    """
    migrations.require_database(url)
    count = 0
    with _transaction(url, is_write=False) as connection:
        migrations.check_connection(connection)
        _write(output, {"format": FORMAT, "schema": migrations.head()})
        for name, table in _TABLES.items():
            for row in connection.execute(select(table)).mappings():
                _write(output, {"table": name, "row": {key: _encoded(value) for key, value in row.items()}})
                count += 1
        _write(output, {"end": count})
    return count


def restore(url: str, source: TextIO) -> int:
    """Fills an empty database with what `export` wrote, all or nothing. How many rows that are. Blocks.

    Raises:
        InvalidArgument: the input is no whole export that this version can read; names the line.
        FailedPrecondition: the database is not empty.
        RegistryUnavailable: no database answers.
    """
    migrations.upgrade(url)
    lines = _lines(source)
    _, head = next(lines, (1, None))
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise InvalidArgument.of("line 1", "is not the beginning of an export")
    known = (*SAME_ROWS, migrations.head())
    if head.get("schema") not in known:
        raise InvalidArgument.of("line 1", f"is of schema {head.get('schema')!r:.20}, this reads {', '.join(known)}")
    with _transaction(url, is_write=True) as connection:
        _check_empty(connection)
        count = _insert_all(connection, lines)
        state = update(RegistryState).values(epoch=str(uuid.uuid4()), compacted_revision=RegistryState.revision)
        connection.execute(state)
    return count


def _insert_all(connection: Connection, lines: Iterator[tuple[int, Any]]) -> int:
    count, pending = 0, list[dict[str, Any]]()
    table: Table | None = None
    for number, line in lines:
        if isinstance(line, dict) and line.get("end") == count:
            _insert(connection, table, pending)
            return count
        found, row = _row(number, line)
        if found is not table or len(pending) == _ROWS_TOGETHER:
            _insert(connection, table, pending)
            table, pending = found, []
        pending.append(row)
        count += 1
    raise InvalidArgument.of(f"line {count + 2}", "the export ends before its end")


def _row(number: int, line: Any) -> tuple[Table, dict[str, Any]]:
    try:
        table, row = _TABLES[line["table"]], line["row"]
        if set(row) != set(table.columns.keys()):
            raise KeyError("columns")
        return table, {column.name: _decoded(row[column.name], column.type) for column in table.columns}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidArgument.of(f"line {number}", "is not a row of an export") from None


def _insert(connection: Connection, table: Table | None, rows: list[dict[str, Any]]) -> None:
    if table is None or not rows:
        return
    try:
        if table.name == RegistryState.__tablename__:
            connection.execute(update(table).values(revision=rows[0]["revision"]))
        else:
            connection.execute(insert(table), rows)
    except OperationalError:
        raise
    except DBAPIError as error:
        raise InvalidArgument.of(table.name, f"its rows contradict each other: {error.orig!s:.200}") from None


def _check_empty(connection: Connection) -> None:
    for model in (BaseModel, Adapter, Tombstone):
        if connection.scalar(select(func.count()).select_from(model)):
            raise FailedPrecondition(f"the database is not empty: there are rows in {model.__tablename__}")


@contextmanager
def _transaction(url: str, *, is_write: bool) -> Iterator[Connection]:
    try:
        with command_engine(url, is_write=is_write) as engine:
            if not is_sqlite(url):
                engine = engine.execution_options(isolation_level="REPEATABLE READ")
            with engine.begin() as connection:
                yield connection
    except OperationalError as error:
        raise RegistryUnavailable(f"the registry's database cannot be used: {error.orig}") from None


def _lines(source: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(source, 1):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidArgument.of(f"line {number}", "is not JSON") from None


def _write(output: TextIO, line: dict[str, Any]) -> None:
    output.write(json.dumps(line, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n")


def _encoded(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _decoded(value: Any, kind: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(kind, UtcDateTime) and value is not None else value
