"""The registry's answers on disk, for an adapter process that starts again while the registry is away.

An SQLite file, written and read by a thread of its own. It is a memory aid: whatever goes wrong with it is logged, and
no answer waits for it. Its times are those of the clock on the wall, since no other outlives a machine.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_SAVED = 50_000
HEARD_SECONDS = 5.0  # how exactly it is known when the watch was last heard, and how far it was

# Values of `is_watched`, which say who tells when an answer is another: it may be another by now, and the watch tells
# when it is gone; the watch of this process; that of a process before it, up to its token; nobody: it may be gone.
_DOUBTED, _WATCHED, _WATCHED_EARLIER, _UNCONFIRMED = 0, 1, 2, 3

_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = off;
create table if not exists answers (
    reference text primary key,
    adapter text not null,
    right_at real not null,
    is_watched integer not null,
    response blob not null
);
create index if not exists answers_by_adapter on answers (adapter);
create table if not exists heard (at real not null);
insert into heard select 0 where not exists (select * from heard);
create table if not exists watched (token text not null);
insert into watched select '' where not exists (select * from watched);
"""
# What a process before this one had watched was right as long as it heard the watch.
_BEGIN = f"""
update answers set right_at = max(right_at, (select at from heard)), is_watched = {_WATCHED_EARLIER}
where is_watched = {_WATCHED}
"""
_TRIM = "delete from answers where reference not in (select reference from answers order by right_at desc limit ?)"
_FIND = f"""
select response, case when is_watched = {_WATCHED} then max(right_at, at) else right_at end
from answers, heard where reference = ?
"""
_DOUBT = f"""
update answers set right_at = case when is_watched = {_WATCHED} then ? else right_at end, is_watched = {_DOUBTED}
where is_watched in ({_WATCHED}, {_WATCHED_EARLIER})
"""


class SavedAnswer(NamedTuple):
    """A serialized ResolveAdapterResponse, and how many seconds ago it was last known to be right."""

    response: bytes
    age: float


class SavedAnswers:
    """Answers of one registry for one base model, in the file `path`. `clock`: seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._heard_at = 0.0
        self._thread = ThreadPoolExecutor(1, "answers")
        self._database: sqlite3.Connection | None = None
        self._thread.submit(self._open).add_done_callback(_log_failure)

    def put(self, reference: str, adapter: str, response: bytes, *, is_watched: bool) -> None:
        """This is the answer now. `is_watched`: the watch tells when it is another."""
        row = (reference, adapter, self._clock(), _WATCHED if is_watched else _UNCONFIRMED, response)
        self._soon("insert or replace into answers values (?, ?, ?, ?, ?)", *row)

    def heard(self, token: str = "") -> None:
        """The watch has told all that is new. `token` resumes it."""
        now = self._clock()
        if now - self._heard_at >= HEARD_SECONDS:
            self._heard_at = now
            self._soon("update heard set at = ?", now)
            self._soon("update watched set token = ?", token)

    def changed(self, adapter: str, ends: Callable[[str, bytes], bool]) -> None:
        """Answers for an adapter may be wrong from now on. Those of which `ends(reference, response)` are dropped."""
        self._thread.submit(self._change, adapter, ends, self._clock()).add_done_callback(_log_failure)

    def doubt(self) -> None:
        """Every answer may be wrong from now on, and no watch can be resumed."""
        self._soon(_DOUBT, self._clock())
        self._soon("update watched set token = ''")
        self._heard_at = 0.0

    def drop(self, reference: str) -> None:
        """The reference means nothing."""
        self._soon("delete from answers where reference = ?", reference)

    def begun_anew(self) -> None:
        """A watch has begun that resumes none: what it does not tell of is to be confirmed."""
        self._soon(f"update answers set is_watched = {_UNCONFIRMED} where is_watched <> {_WATCHED}")

    def resumed(self) -> None:
        """The watch that begins at `token` has told everything since: what it did not change is right and watched."""
        statement = f"update answers set right_at = ?, is_watched = {_WATCHED} where is_watched = {_WATCHED_EARLIER}"
        self._soon(statement, self._clock())

    async def unconfirmed(self) -> list[str]:
        """References whose answers are to be asked for again, since they may be gone."""
        return await self._read(self._references_unconfirmed, otherwise=[])

    async def token(self) -> str:
        """Resumes the watch of the process that wrote the answers; empty if there are none, or it had no watch."""
        return await self._read(self._token, otherwise="")

    async def find(self, reference: str) -> SavedAnswer | None:
        """The last answer."""
        return await self._read(lambda: self._find(reference), otherwise=None)

    async def _read(self, read: Callable[[], T], otherwise: T) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(read))
        except sqlite3.Error as error:
            log.warning("the registry's answers of earlier cannot be read: %s", error)
            return otherwise

    def close(self) -> None:
        """Write what is left. Blocks."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    def _open(self) -> None:
        database = sqlite3.connect(self._path, timeout=1.0, check_same_thread=False)
        database.executescript(_SCHEMA)
        with database:
            database.execute(_BEGIN)
            database.execute(_TRIM, (MAX_SAVED,))
        self._database = database

    def _find(self, reference: str) -> SavedAnswer | None:
        if self._database is None:
            return None
        row = self._database.execute(_FIND, (reference,)).fetchone()
        return None if row is None else SavedAnswer(row[0], max(self._clock() - row[1], 0.0))

    def _token(self) -> str:
        query = "select token from watched where exists (select * from answers)"
        row = None if self._database is None else self._database.execute(query).fetchone()
        return "" if row is None else str(row[0])

    def _references_unconfirmed(self) -> list[str]:
        query = f"select reference from answers where is_watched = {_UNCONFIRMED}"
        return [] if self._database is None else [row[0] for row in self._database.execute(query)]

    def _change(self, adapter: str, ends: Callable[[str, bytes], bool], now: float) -> None:
        if self._database is None:
            return
        query = "select reference, response from answers where adapter = ?"
        rows = self._database.execute(query, (adapter,)).fetchall()
        if not rows:
            return
        ended = [(reference,) for reference, response in rows if ends(reference, response)]
        with self._database:
            self._database.executemany("delete from answers where reference = ?", ended)
            self._database.execute(f"{_DOUBT} and adapter = ?", (now, adapter))

    def _soon(self, statement: str, *values: object) -> None:
        self._thread.submit(self._write, statement, values).add_done_callback(_log_failure)

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        if self._database is not None:
            with self._database:
                self._database.execute(statement, values)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()


def _log_failure(done: "Future[None]") -> None:
    if (error := done.exception()) is not None:
        log.warning("the registry's answers are not kept: %s", error)
