"""Schema migrations: `upgrade` brings a database to this code's schema, `check` says whether it is there.

SQLite is upgraded at start-up. Postgres is upgraded by `python -m registry_service migrate` only, under a lock.
"""

import logging
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from registry_service.command_engine import command_engine
from registry_service.database import DEFAULT_URL, is_sqlite
from registry_service.migrations.online import build_indexes
from registry_service.migrations.revisions import SchemaOutdated, known_revision
from shared.errors import InvalidArgument, RegistryUnavailable

log = logging.getLogger(__name__)
# It tells of every look at a database that it has looked; what it has changed is said here.
logging.getLogger("alembic").setLevel(logging.WARNING)

_NO_DATABASE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_LOCK_KEY = 0x6C6F7261  # any number, the same for every registry
# alembic keeps its context in module globals.
_alembic = threading.Lock()


def upgrade(url: str, revision: str = "head") -> None:
    """Brings the database at `url` (as configured) to `revision`: on Postgres indexes first, then the rest in one
    transaction. Blocks.

    Raises:
        InvalidArgument: no SQLite database can be made at that path. A mistyped one shall not become an empty registry,
            so its folder must be there; only that of the default is made.
        SchemaOutdated: a newer version of the registry has written it.
        RegistryUnavailable: no database answers.
    """
    if is_sqlite(url):
        check_folder(url)
    else:
        with _engine(url) as engine:
            build_indexes(engine, _script(), revision)
    with _alembic, _connection(url) as connection:
        before = known_revision(connection, _script())
        command.upgrade(_config(connection), revision)
        after = known_revision(connection, _script())
    if after != before:
        log.info("the database's schema is migrated", extra={"from_revision": before, "to_revision": after})


def downgrade(url: str, revision: str = "base") -> None:
    """Takes the database back to `revision`, in one transaction. Blocks."""
    with _alembic, _connection(url) as connection:
        command.downgrade(_config(connection), revision)


def check(url: str) -> None:
    """Returns if the schema is this code's. Blocks.

    Raises:
        SchemaOutdated: says what to run.
        RegistryUnavailable: no database answers.
    """
    with _connection(url) as connection:
        check_connection(connection)


def check_connection(connection: Connection) -> None:
    """As `check`, in a transaction that there is."""
    found = known_revision(connection, _script())
    if found != head():
        raise _not_migrated(f"at revision {found}" if found else "without tables")


def _not_migrated(state: str) -> SchemaOutdated:
    return SchemaOutdated(
        f"the database is {state}, this registry needs {head()}: run `loraplex registry migrate` with the same "
        "--database"
    )


def head() -> str:
    """The revision of this code's schema."""
    return str(_script().get_current_head())


def _script() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return ScriptDirectory.from_config(config)


def new_epoch(url: str) -> str:
    """Begins a new life of the database: it was restored from a backup, and watches of the lost one must not continue.

    Returns the epoch. Blocks.

    Raises:
        InvalidArgument: there is no SQLite database at that path.
        SchemaOutdated: a newer version of the registry has written it, or it has no tables.
        RegistryUnavailable: no database answers.
    """
    require_database(url)
    epoch = str(uuid.uuid4())
    with _connection(url) as connection:
        if known_revision(connection, _script()) is None:
            raise _not_migrated("without tables")
        connection.execute(text("UPDATE registry_state SET epoch = :epoch"), {"epoch": epoch})
    return epoch


@contextmanager
def _connection(url: str) -> Iterator[Connection]:
    """A transaction that nobody else migrates in."""
    with _engine(url) as engine, engine.begin() as connection:
        if not is_sqlite(url):
            _lock(connection)
        yield connection


def _lock(connection: Connection) -> None:
    """Until the transaction ends."""
    if not connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK_KEY}):
        log.info("waiting for another process that migrates the database")
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    """Connections for a migration; what goes wrong with them is said as `upgrade` says."""
    try:
        with command_engine(url, is_write=True) as engine:
            yield engine
    except (DBAPIError, sqlite3.Error) as error:
        reason = error.orig if isinstance(error, DBAPIError) else error
        if getattr(reason, "sqlite_errorcode", 0) & 0xFF in _NO_DATABASE:
            raise InvalidArgument.of("database", f"{url} cannot be used: {reason}") from None
        if not isinstance(error, OperationalError):
            raise
        raise RegistryUnavailable(f"the registry's database cannot be used: {reason}") from error
    except CommandError as error:
        raise SchemaOutdated(f"the database was written by another version of the registry: {error}") from error


def require_database(url: str) -> None:
    """For what only reads or changes a database: SQLite would make an empty one.

    Raises:
        InvalidArgument: there is no SQLite database at that path.
    """
    if is_sqlite(url) and not Path(url.removeprefix("sqlite:///")).exists():
        raise InvalidArgument.of("database", f"there is none at {url}")


def check_folder(url: str) -> None:
    """See `upgrade`. Makes the folder of the default."""
    folder = Path(url.removeprefix("sqlite:///")).parent
    try:
        if url == DEFAULT_URL:
            folder.mkdir(exist_ok=True)
        is_there = folder.is_dir()
    except OSError as error:
        raise InvalidArgument.of("database", f"its folder {folder} cannot be used: {error.strerror}") from None
    if not is_there:
        raise InvalidArgument.of("database", f"its folder {folder} does not exist; make it, or correct the path")


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
