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
from typing import NamedTuple

log = logging.getLogger(__name__)

MAX_SAVED = 50_000
HEARD_SECONDS = 5.0  # how exactly it is known when the watch was last heard

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
"""
# What a process before this one had watched was right as long as it heard the watch, and nobody has watched it since.
_BEGIN = "update answers set right_at = max(right_at, (select at from heard)), is_watched = 0 where is_watched"
_TRIM = "delete from answers where reference not in (select reference from answers order by right_at desc limit ?)"
_FIND = """
select response, case when is_watched then max(right_at, at) else right_at end
from answers, heard where reference = ?
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
        row = (reference, adapter, self._clock(), is_watched, response)
        self._soon("insert or replace into answers values (?, ?, ?, ?, ?)", *row)

    def heard(self) -> None:
        """The watch has told all that is new."""
        now = self._clock()
        if now - self._heard_at >= HEARD_SECONDS:
            self._heard_at = now
            self._soon("update heard set at = ?", now)

    def doubt(self, adapter: str | None = None) -> None:
        """Answers for an adapter, or for all, may be wrong from now on."""
        now = self._clock()
        condition, values = ("", (now,)) if adapter is None else (" and adapter = ?", (now, adapter))
        self._soon(f"update answers set right_at = ?, is_watched = 0 where is_watched{condition}", *values)

    def drop(self, reference: str) -> None:
        """The reference means nothing."""
        self._soon("delete from answers where reference = ?", reference)

    def drop_adapter(self, adapter: str) -> None:
        """No reference to the adapter means anything."""
        self._soon("delete from answers where adapter = ?", adapter)

    def confirm(self, is_right: Callable[[str, bytes], bool]) -> None:
        """Answers that the watch does not tell of are right now if `is_right(reference, response)`, else dropped."""
        self._thread.submit(self._confirm, is_right, self._clock()).add_done_callback(_log_failure)

    async def has_any(self) -> bool:
        """Whether there are answers."""
        try:
            return await asyncio.wrap_future(self._thread.submit(self._has_any))
        except sqlite3.Error as error:
            log.warning("the registry's answers of earlier cannot be read: %s", error)
            return False

    async def find(self, reference: str) -> SavedAnswer | None:
        """The last answer."""
        try:
            return await asyncio.wrap_future(self._thread.submit(self._find, reference))
        except sqlite3.Error as error:
            log.warning("the registry's answers of earlier cannot be read: %s", error)
            return None

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

    def _has_any(self) -> bool:
        return self._database is not None and self._database.execute("select 1 from answers").fetchone() is not None

    def _confirm(self, is_right: Callable[[str, bytes], bool], now: float) -> None:
        if self._database is None:
            return
        rows = self._database.execute("select reference, response from answers where not is_watched")
        wrong = [(reference,) for reference, response in rows if not is_right(reference, response)]
        with self._database:
            self._database.executemany("delete from answers where reference = ?", wrong)
            self._database.execute("update answers set right_at = ? where not is_watched", (now,))

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
