"""Transactions on SQLite or Postgres. Work is a coroutine function that takes a session, so that it can be repeated.

SQLite: the driver's own transaction control is off; writes begin IMMEDIATE, so a writer waits at its start and never
fails in its middle. Postgres: reads see one snapshot; writes run READ COMMITTED and lock the rows they decide by.
One SELECT alone sees one moment on either, so it goes without a transaction.

Nothing waits for a database without end: what has not ended within `LIMIT_SECONDS` is given up, and so is its
connection. Whether a write was committed is then as little known as when its connection breaks during the commit.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, ExceptionContext, Executable, Row, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from registry_service.database_errors import cause, kind_of
from registry_service.giving_up import give_up
from shared.errors import RegistryUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]

MAX_OVERFLOW = 10  # connections that a pool opens beyond its size while they are needed
LIMIT_SECONDS = 15.0  # for a transaction with its repetitions, the wait for a connection included
_ATTEMPTS = 5
_RETRY_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_BUSY_MILLISECONDS = 10_000
# Arguments of connections to Postgres: one whose other end is gone without a word is given up within seconds.
PATIENCE: dict[str, Any] = {
    "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "tcp_user_timeout": 10_000
}  # fmt: skip
_UNAVAILABLE = "the registry's database is unavailable"
_POSTGRES: dict[str, Any] = {
    "pool_timeout": 10,
    "max_overflow": MAX_OVERFLOW,
    # Prepared statements do not survive a transaction pooler between us and Postgres.
    "connect_args": {"prepare_threshold": None, **PATIENCE},
}
DEFAULT_URL = "sqlite:///var/registry.db"  # as in the configuration

_TAKES_NO_WRITES = ("25006", "0A000")  # read-only transaction; READ WRITE cannot be set while a standby recovers


class Database:
    """Connections, and the only ways to use them: `read` and `write` are transactions, `rows` is one SELECT."""

    def __init__(self, url: str) -> None:
        """`url` is sqlite:///PATH or postgresql://…, as in the configuration."""
        self.engine = _create_engine(url)
        self.lookups = _create_lookups(url)
        writing = self.engine.execution_options(is_write=True)
        reading = self.engine
        if not is_sqlite(url):
            reading = reading.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._readers = async_sessionmaker(reading, expire_on_commit=False)
        self._writers = async_sessionmaker(writing, expire_on_commit=False)
        self._running: set[asyncio.Task[Any]] = set()
        self._is_down = False
        self._num_disposals = 0
        for engine in (self.engine, self.lookups):
            self._close_after_disposal(engine.sync_engine if isinstance(engine, AsyncEngine) else engine)
        self.on_write: Callable[[], None] = lambda: None  # called after every commit of a `write`
        self.on_connection: Callable[[float], None] = lambda seconds: None  # told how long each was waited for

    @property
    def is_up(self) -> bool:
        """Whether the last transaction found a usable database."""
        return not self._is_down

    async def read(self, work: Work[T]) -> T:
        """The result of `work` in one read-only transaction."""
        return await self._finished(self._repeat(lambda: self._transaction(self._readers, work)))

    async def rows(self, query: Executable, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
        """The rows of one SELECT, for less than half of what a transaction would cost.

        Raises:
            RegistryUnavailable: the database cannot be reached.
        """

        async def once() -> Sequence[Row[Any]]:
            try:
                return await self._select(query, values)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
            return await self._select(query, values)  # the connection was dead; with it went all others of the pool

        return await self._finished(self._repeat(once))

    async def write(self, work: Work[T]) -> T:
        """The result of `work` in one transaction, committed. `work` is repeated if it lost a race, so it must have no
        effect but on its session.

        Raises:
            RegistryUnavailable: the database cannot be reached.
        """

        async def committed() -> T:
            result = await self._repeat(lambda: self._transaction(self._writers, work))
            self.on_write()
            return result

        return await self._finished(committed())

    async def close(self) -> None:
        """Waits a moment for what runs, gives up what then still does, and closes every connection."""
        if self._running:
            _, overdue = await asyncio.wait(self._running, timeout=0 if self._is_down else _CLOSE_SECONDS)
            await give_up(overdue)
        await self._dispose()

    async def _dispose(self) -> None:
        """Closes connections that are not in use; those that are, when they are returned."""
        self._num_disposals += 1
        await self.engine.dispose()
        if isinstance(self.lookups, AsyncEngine):
            await self.lookups.dispose()
        else:
            self.lookups.dispose()

    def _close_after_disposal(self, engine: Engine) -> None:
        """A pool that was disposed of keeps what is returned to it, for nobody."""

        @event.listens_for(engine, "connect")
        def on_connect(_connection: object, record: ConnectionPoolEntry) -> None:
            record.info["num_disposals"] = self._num_disposals

        @event.listens_for(engine, "checkin")
        def on_checkin(connection: object | None, record: ConnectionPoolEntry) -> None:
            if connection is not None and record.info["num_disposals"] < self._num_disposals:
                record.invalidate()

    async def _finished(self, transaction: Coroutine[Any, Any, T]) -> T:
        """It runs to its end though its caller may leave: cut off half-way it would cost its connection."""
        return await asyncio.shield(self._started(self._limited(self._started(transaction))))

    async def _limited(self, task: "asyncio.Task[T]") -> T:
        await asyncio.wait([task], timeout=LIMIT_SECONDS)
        if task.done():
            return task.result()
        self._started(give_up([task]))  # nobody waits for that
        if not self._is_down and isinstance(self.lookups, AsyncEngine):
            # Connections that idle are likely no better, and each would cost a caller as much; new ones fail sooner.
            self._started(self._dispose())
        self._went_down(f"no answer within {LIMIT_SECONDS:g} s")
        raise RegistryUnavailable(_UNAVAILABLE, retry_after=_RETRY_SECONDS)

    def _started(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any more

    async def _select(self, query: Executable, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
        began = time.monotonic()
        if isinstance(self.lookups, Engine):
            return await asyncio.to_thread(_select_now, self.lookups, query, values)
        async with self.lookups.connect() as connection:
            self.on_connection(time.monotonic() - began)
            return (await connection.execute(query, values)).all()

    async def _transaction(self, sessions: async_sessionmaker[AsyncSession], work: Work[T]) -> T:
        began = time.monotonic()
        async with sessions.begin() as session:
            await session.connection()
            self.on_connection(time.monotonic() - began)
            return await work(session)

    async def _repeat(self, once: Callable[[], Awaitable[T]]) -> T:
        latest = time.monotonic() + _BUSY_MILLISECONDS / 1000  # a SQLite file that is locked for so long stays so
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                result = await once()
                self._came_up()
                return result
            except (DBAPIError, PoolTimeout, OSError) as error:
                kind = kind_of(error)
                if kind == "bug" or (attempt == _ATTEMPTS and isinstance(error, IntegrityError)):
                    raise
                if kind == "lost" or attempt == _ATTEMPTS or time.monotonic() >= latest:
                    self._went_down(cause(error))
                    raise RegistryUnavailable(_UNAVAILABLE, retry_after=_RETRY_SECONDS) from None
                await asyncio.sleep(random.uniform(0, 0.02) * attempt)
        raise AssertionError("unreachable")

    def _went_down(self, reason: str) -> None:
        if not self._is_down:
            log.warning("the database cannot be used: %s", reason)
        self._is_down = True

    def _came_up(self) -> None:
        if self._is_down:
            log.info("the database can be used again")
        self._is_down = False


def is_sqlite(url: str) -> bool:
    """Whether a configured URL names the embedded database."""
    return url.startswith("sqlite:")


def driver_url(url: str, *, is_async: bool) -> str:
    """A configured URL with the driver that SQLAlchemy shall use."""
    if is_sqlite(url):
        return url.replace("sqlite:", "sqlite+aiosqlite:" if is_async else "sqlite+pysqlite:", 1)
    return url.replace("postgresql:", "postgresql+psycopg:", 1)


def _create_engine(url: str) -> AsyncEngine:
    if is_sqlite(url):
        engine = create_async_engine(driver_url(url, is_async=True), pool_size=8, max_overflow=MAX_OVERFLOW)
        configure_sqlite(engine.sync_engine)
        return engine
    engine = create_async_engine(driver_url(url, is_async=True), pool_size=10, pool_pre_ping=True, **_POSTGRES)
    event.listen(engine.sync_engine, "handle_error", _leave_standby)
    return engine


def _leave_standby(context: ExceptionContext) -> None:
    """A server that takes no writes is as good as gone: all connect anew, to the primary of now."""
    is_write = context.connection is not None and context.connection.get_execution_options().get("is_write", False)
    if is_write and getattr(context.original_exception, "sqlstate", None) in _TAKES_NO_WRITES:
        context.is_disconnect = True


def _create_lookups(url: str) -> AsyncEngine | Engine:
    """Connections that take each statement as it comes. SQLite's are for threads: the asynchronous driver needs four
    hops to a thread for a SELECT."""
    settings: dict[str, Any] = {"pool_size": 4, "isolation_level": "AUTOCOMMIT", "skip_autocommit_rollback": True}
    if is_sqlite(url):
        engine = create_engine(driver_url(url, is_async=False), max_overflow=MAX_OVERFLOW, **settings)
        configure_sqlite(engine, begins=False)
        return engine
    return create_async_engine(driver_url(url, is_async=True), **settings, **_POSTGRES)


def _select_now(engine: Engine, query: Executable, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
    with engine.connect() as connection:
        return connection.execute(query, values).all()


def configure_sqlite(engine: Any, *, begins: bool = True) -> None:
    """Makes a (synchronous) SQLite engine keep foreign keys and begin transactions, if it does, as this module says."""

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", f"busy_timeout={_BUSY_MILLISECONDS}", "foreign_keys=ON", "synchronous=FULL"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def on_begin(connection: Connection) -> None:
        is_write = connection.get_execution_options().get("is_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    if begins:
        event.listen(engine, "begin", on_begin)
