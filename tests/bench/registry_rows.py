"""Copies of a registered adapter by the hundred thousand, written by the database itself."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func, literal, select

from registry_service.database import configure_sqlite, driver_url, is_sqlite
from registry_service.models import Adapter, AdapterVersion, Alias, AliasTarget, Change, RegistryState

TEAMS = 100
_SPREAD, _NAMES = 611_953, 9_000_000  # without a common divisor: names and uids are distinct, and in no order


def copy_name(number: int) -> str:
    """The name of the copy with this number."""
    return f"adapter-{_scattered(number)}"


def copy_adapter(url: str, template: str, first: int, count: int) -> None:
    """Write `count` copies of the adapter `template`, numbered from `first`, with its versions and aliases, each with a
    change in the log. The label `team` is one of 100, `owner` one of as many as there are copies. Blocks."""
    engine = sa.create_engine(driver_url(url, is_async=False), execution_options={"is_write": True})
    if is_sqlite(url):
        configure_sqlite(engine)
    with engine.begin() as connection:
        numbers = _numbers(first, count)
        uid = connection.scalar(select(Adapter.uid).where(Adapter.name == template))
        mark = sa.cast(_scattered(numbers.c.number), sa.Text)
        new_uid = mark + func.substr(literal(uid), 8)
        of_adapter = {"adapter_uid": new_uid}
        version_uid = mark + func.substr(AdapterVersion.uid, 8)
        digest = func.substr(AdapterVersion.digest, 1, 64) + mark
        labels = _labels(connection, numbers.c.number)
        revision = select(RegistryState.revision).scalar_subquery() + numbers.c.number - first + 1
        for table, changed in (
            (Adapter, {"uid": new_uid, "name": literal("adapter-") + mark, "labels": labels}),
            (AdapterVersion, {**of_adapter, "uid": version_uid, "digest": digest}),
            (Alias, of_adapter),
            (AliasTarget, of_adapter),
        ):
            column = Adapter.uid if table is Adapter else table.adapter_uid
            connection.execute(_copies(table.__table__, column == uid, numbers, changed))
        last = select(func.max(Change.revision)).where(Change.adapter_uid == uid).scalar_subquery()
        changed = {**of_adapter, "revision": revision}
        connection.execute(_copies(Change.__table__, Change.revision == last, numbers, changed))
        connection.execute(sa.update(RegistryState).values(revision=RegistryState.revision + count))
    with engine.connect() as connection:
        connection.execute(sa.text("ANALYZE"))
        connection.commit()
    engine.dispose()


def _scattered(number: Any) -> Any:
    """Seven digits."""
    return 1_000_000 + number * _SPREAD % _NAMES


def _numbers(first: int, count: int) -> sa.CTE:
    start = select(sa.cast(first, sa.BigInteger).label("number")).cte("numbers", recursive=True)
    return start.union_all(select(start.c.number + 1).where(start.c.number < first + count - 1))


def _labels(connection: sa.Connection, number: Any) -> sa.ColumnElement[Any]:
    build = func.jsonb_build_object if connection.dialect.name == "postgresql" else func.json_object
    team = literal("team-") + sa.cast(number % TEAMS, sa.Text)
    return build(literal("team"), team, literal("owner"), literal("user-") + sa.cast(number, sa.Text))


def _copies(table: sa.Table, condition: sa.ColumnElement[bool], numbers: Any, changed: Mapping[str, Any]) -> Any:
    """Rows like those of `table` that fulfil `condition`, once for each number."""
    columns = [changed.get(column.name, column) for column in table.columns]
    rows = select(*columns).select_from(table.join(numbers, sa.true())).where(condition)
    return sa.insert(table).from_select([column.name for column in table.columns], rows)
