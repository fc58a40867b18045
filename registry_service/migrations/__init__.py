"""Schema migrations: `upgrade` brings a database to this code's schema, `check` says whether it is there.

SQLite is upgraded at start-up. Postgres is upgraded by `python -m registry_service migrate` only, under a lock.
"""

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
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from registry_service.database import DEFAULT_URL, configure_sqlite, driver_url, is_sqlite
from registry_service.migrations.online import build_indexes
from registry_service.migrations.revisions import SchemaOutdated, known_revision
from shared.errors import InvalidArgument, RegistryUnavailable

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
        _check_folder(url)
    else:
        with _engine(url) as engine:
            build_indexes(engine, _script(), revision)
    with _alembic, _connection(url) as connection:
        known_revision(connection, _script())
        command.upgrade(_config(connection), revision)


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
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        yield connection


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    """Connections for a migration; what goes wrong with them is said as `upgrade` says."""
    engine = create_engine(driver_url(url, is_async=False), execution_options={"is_write": True})
    if is_sqlite(url):
        configure_sqlite(engine)
    try:
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
    finally:
        engine.dispose()


def require_database(url: str) -> None:
    """For what only reads or changes a database: SQLite would make an empty one.

    Raises:
        InvalidArgument: there is no SQLite database at that path.
    """
    if is_sqlite(url) and not Path(url.removeprefix("sqlite:///")).exists():
        raise InvalidArgument.of("database", f"there is none at {url}")


def _check_folder(url: str) -> None:
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
