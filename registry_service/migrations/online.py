"""Builds indexes while registries read and write: CREATE INDEX CONCURRENTLY, which no transaction can do.

A migration's own CREATE INDEX keeps writers waiting for as long as it takes. So before alembic begins, a database that
stands right before a migration with `INDEXES` gets them here; the migration then finds them and only counts itself.
"""

import logging
import time

from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from registry_service.migrations.revisions import known_revision

log = logging.getLogger(__name__)

_LOCK_KEY = 0x696E6478  # any number, the same for every registry
_POLL_SECONDS = 0.2
# Left behind by a build that was cut off: it is kept up to date and answers nothing.
_IS_INVALID = text("SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid")


def build_indexes(engine: Engine, script: ScriptDirectory, revision: str) -> None:
    """Builds those of the next migration, if `revision` lies beyond the database's. One process does, others wait.

    Raises:
        SchemaOutdated: the database is newer than `script`.
    """
    with engine.connect() as waiting, waiting.begin(), engine.connect() as connection:
        _lock(waiting)
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        for name, rest in _next_indexes(connection, script, revision):
            _build(connection, name, rest)


def _lock(waiting: Connection) -> None:
    """Until the transaction ends, also behind a transaction pooler.

    The build waits until all older snapshots are gone. A statement that waits for the lock would hold one, and so would
    one with parameters, whose portal stays open until the next.
    """
    is_told = False
    while not waiting.scalar(text(f"SELECT pg_try_advisory_xact_lock({_LOCK_KEY})")):
        if not is_told:
            log.info("waiting for another process that builds indexes of the database")
        is_told = True
        time.sleep(_POLL_SECONDS)


def _next_indexes(connection: Connection, script: ScriptDirectory, revision: str) -> tuple[tuple[str, str], ...]:
    current = known_revision(connection, script)
    if current is None:
        return ()
    steps = list(script.iterate_revisions(revision, current))
    if not steps or steps[-1].down_revision != current:
        return ()
    found: dict[str, tuple[tuple[str, str], ...]] = getattr(steps[-1].module, "INDEXES", {})
    return found.get("postgresql", ())


def _build(connection: Connection, name: str, rest: str) -> None:
    if connection.scalar(_IS_INVALID, {"name": name}):
        connection.execute(text(f"DROP INDEX CONCURRENTLY {name}"))
    began = time.monotonic()
    connection.execute(text(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} {rest}"))
    log.info("built index %s", name, extra={"seconds": round(time.monotonic() - began, 3)})
