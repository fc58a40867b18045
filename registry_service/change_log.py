"""The only reader of the change log in this process: what it reads goes to the cache and to every watch."""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from registry_service import records
from registry_service.database import Database
from registry_service.records import LoggedChange, LogPage, LogState
from shared.errors import RegistryUnavailable, WatchCompacted

log = logging.getLogger(__name__)

PAGE_CHANGES = 50  # read at once: to make records of more (0.4 ms each) would keep resolutions waiting
COMPACTION_SECONDS = 60.0
GATHER_SECONDS = 0.005  # from a hint to the look: whoever committed is answered first, and a burst is read at once
MAX_LAG_SECONDS = 5.0  # without a look at the log, what was read of it is not taken for the present


class LogSettings(NamedTuple):
    """How often to look when nobody calls `wake`, how many changes to hold in memory for watches, and how many and how
    old ones the database keeps for those that come back."""

    poll_seconds: float = 0.25
    recent_changes: int = 1000
    keep_changes: int = 100_000
    keep_seconds: float = 86_400.0


class Position(NamedTuple):
    """Everything up to `revision` is known, of the database whose life is `epoch`."""

    epoch: str
    revision: int


class ChangeLog:
    """The log up to `position`, and its most recent changes in memory.

    Args:
        follow: Is called with what was read, in order, or with None: all that it was told before may be outdated.
    """

    def __init__(
        self, database: Database, settings: LogSettings, follow: Callable[[Sequence[LoggedChange] | None], None]
    ) -> None:
        self._database = database
        self._settings = settings
        self._follow = follow
        self._state = LogState("", 0, 0)
        self._recent: list[LoggedChange] = []
        self._recent_after = 0  # every later change is in `_recent`
        self.read_at = 0.0  # when the log was looked at
        self.lag = 0  # changes that there were then and that have not been read
        self._woken = asyncio.Event()
        self._advanced = asyncio.Event()  # replaced whenever it is set
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins with what is there.

        Raises:
            RegistryUnavailable: the database cannot be reached.
        """
        self._start_over(await self._database.read(records.log_state))
        self.read_at = time.monotonic()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read_forever()), loop.create_task(self._compact_forever())]

    async def close(self) -> None:
        """Reads no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def position(self) -> Position:
        """How far the log was read."""
        return Position(self._state.epoch, self._state.revision)

    def is_current(self) -> bool:
        """Whether the log was looked at a moment ago."""
        return time.monotonic() < self.read_at + MAX_LAG_SECONDS

    def wake(self) -> None:
        """Something may have been committed: look now."""
        self._woken.set()

    def release(self) -> None:
        """Lets everybody go who waits in `advance`."""
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def advance(self, revision: int, seconds: float) -> None:
        """Returns when something after `revision` was read, on `release`, or after some seconds."""
        advanced = self._advanced
        if self._state.revision <= revision:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await advanced.wait()

    async def reaches(self, revision: int, seconds: float) -> bool:
        """Whether the log has been read up to `revision`, now or within some seconds."""
        deadline = time.monotonic() + seconds
        self.wake()
        while self._state.revision < revision and (left := deadline - time.monotonic()) > 0:
            await self.advance(revision - 1, left)
        return self._state.revision >= revision

    def recent(self, position: Position) -> Sequence[LoggedChange] | None:
        """What was read after `position`; None if that is not in memory any more.

        Raises:
            WatchCompacted: the position is not one of this database.
        """
        if position.epoch != self._state.epoch or position.revision > self._state.revision:
            raise compacted(position)
        if position.revision < self._recent_after:
            return None
        return self._recent[bisect_right(self._recent, position.revision, key=lambda change: change.revision) :]

    async def history(self, position: Position) -> LogPage:
        """The next page after `position`, from the database.

        Raises:
            WatchCompacted: what came after it is forgotten.
        """
        page = await self._database.read(lambda s: records.changes_after(s, position.revision, PAGE_CHANGES))
        if page.state.epoch != position.epoch or page.state.compacted > position.revision:
            raise compacted(position)
        return page

    async def _read_forever(self) -> None:
        while True:
            self._woken.clear()
            try:
                has_more = await self._read()
            except RegistryUnavailable:
                has_more = False
            except Exception:
                has_more = False
                log.exception("the change log cannot be read")
            if not has_more:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.poll_seconds):
                        await self._woken.wait()
                        await asyncio.sleep(GATHER_SECONDS)

    async def _read(self) -> bool:
        """Reads one page. Whether there is more."""
        began = time.monotonic()
        after = self._state.revision
        state, changes, through = await self._database.read(lambda s: records.changes_after(s, after, PAGE_CHANGES))
        self.read_at = began
        self.lag = max(state.revision - through, 0)
        if state.epoch != self._state.epoch or state.revision < after or state.compacted > after:
            log.warning("the change log does not continue at revision %d: starting over", after)
            self._start_over(state)
        elif through > after:
            self._recent.extend(changes)
            self._trim()
            self._follow(changes)
            self._state = state._replace(revision=through)
            self.release()
        return through < state.revision

    def _trim(self) -> None:
        surplus = len(self._recent) - self._settings.recent_changes
        if surplus > 0:
            self._recent_after = self._recent[surplus - 1].revision
            del self._recent[:surplus]

    def _start_over(self, state: LogState) -> None:
        self._recent.clear()
        self._recent_after = state.revision
        self._follow(None)
        self._state = state
        self.release()

    async def _compact_forever(self) -> None:
        while True:
            try:
                await self.compact()
            except RegistryUnavailable:
                pass  # the reader says so
            except Exception:
                log.exception("the change log cannot be compacted")
            await asyncio.sleep(COMPACTION_SECONDS)

    async def compact(self) -> None:
        """Deletes what the settings do not keep. Any number of registries may do it."""
        before = datetime.now(UTC) - timedelta(seconds=self._settings.keep_seconds)
        keep = self._settings.keep_changes
        if number := await self._database.write(lambda session: records.compact(session, before, keep)):
            log.info("compacted the change log", extra={"changes": number})


def compacted(position: Position) -> WatchCompacted:
    """The error for a position that nothing can be continued from."""
    return WatchCompacted(
        f"the changes after revision {position.revision} are not kept any more: begin anew without a resume_token",
        metadata={"revision": str(position.revision)},
    )
