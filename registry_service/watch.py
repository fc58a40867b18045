"""WatchAdapters: a snapshot page by page, what was missed, then what the change log's reader hands out.

A watch holds no queue, only its position. One that reads so slowly that its next change is no longer in memory is ended
and may resume, which then costs it queries of its own.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from registry_service import records
from registry_service.change_log import PAGE_CHANGES, ChangeLog, Position, compacted
from registry_service.database import Database
from registry_service.records import LoggedChange
from shared.auth import Caller
from shared.errors import Draining, InvalidArgument, RegistryUnavailable, WatchTooSlow

MAX_TOKEN_CHARS = 1024
MAX_HISTORY_READS = 4  # at once: snapshots must not take every connection to the database
CATCH_UP_SECONDS = 2.0
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class ResumeToken:
    """Where a watch continues: after `position`. Before that comes what is left of a snapshot that had not ended: the
    adapters after `snapshot_after` (namespace, name)."""

    position: Position
    snapshot_after: tuple[str, str] | None = None

    def text(self) -> str:
        """Opaque; `read_resume_token` reads it."""
        content = json.dumps([*self.position, *(self.snapshot_after or ())], separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def read_resume_token(text: str) -> ResumeToken | None:
    """The token that a request carries, if any.

    Raises:
        InvalidArgument: on resume_token.
    """
    if not text:
        return None
    try:
        padded = text[:MAX_TOKEN_CHARS].encode("ascii") + b"=" * (-len(text) % 4)
        parts = json.loads(base64.b64decode(padded, b"-_", validate=True))
    except (ValueError, RecursionError):
        parts = None
    match parts:
        case [str(epoch), int(revision)] if 0 <= revision < 1 << 63:
            return ResumeToken(Position(epoch, revision))
        case [str(epoch), int(revision), str(namespace), str(name)] if 0 <= revision < 1 << 63:
            if namespace.isascii() and name.isascii() and (namespace + name).isprintable():
                return ResumeToken(Position(epoch, revision), (namespace, name))
    raise InvalidArgument.of("resume_token", "is not a token of this service")


class WatchRequest(NamedTuple):
    """A checked request; `namespace` and `base_model` (an id) are empty for all.

    `is_wanted_only`: the snapshot has only adapters that replicas shall hold.
    """

    namespace: str
    base_model: str
    token: ResumeToken | None
    skip_snapshot: bool
    is_wanted_only: bool = False


class Batch(NamedTuple):
    """What a watch is told at once. `token` continues after all of it; `is_complete`: see `snapshot_complete`."""

    changes: Sequence[LoggedChange]
    token: ResumeToken
    is_snapshot: bool = False
    is_complete: bool = False

    def token_after(self, change: LoggedChange) -> ResumeToken:
        """Continues after one change of this batch."""
        if self.is_snapshot:
            adapter = change.record.adapter
            return ResumeToken(self.token.position, (adapter.namespace, adapter.name))
        return ResumeToken(self.token.position._replace(revision=change.revision))


class _Wanted(NamedTuple):
    """Which adapters a watch is told of."""

    namespaces: frozenset[str] | None  # None: all
    base_model: str

    def of(self, changes: Sequence[LoggedChange]) -> list[LoggedChange]:
        return [
            change
            for change in changes
            if (self.namespaces is None or change.record.adapter.namespace in self.namespaces)
            and self.base_model in ("", change.record.adapter.base_model)
        ]


@dataclass(eq=False)
class WatchProgress:
    """How far a watch is: everything up to `revision` was taken; since when what comes next is being sent, if it is."""

    revision: int
    sending_since: float | None = None


class Watches:
    """The watches of one registry. One that has nothing to tell says so every `heartbeat` seconds."""

    def __init__(self, database: Database, log: ChangeLog, heartbeat: float) -> None:
        self._database = database
        self._log = log
        self._heartbeat = heartbeat
        self._history_reads = asyncio.Semaphore(MAX_HISTORY_READS)
        self._is_draining = False
        self.progress: set[WatchProgress] = set()  # of the open watches

    def drain(self) -> None:
        """Ends every watch, now and from now on."""
        self._is_draining = True
        self._log.release()

    async def watch(self, caller: Caller, request: WatchRequest) -> AsyncIterator[Batch]:
        """Batches until the caller leaves.

        Raises:
            WatchCompacted: the resume token is not of this database, or what came after it is forgotten.
            WatchTooSlow: the caller did not keep up.
            Draining: this registry ends.
        """
        wanted = _Wanted(_readable(caller, request.namespace), request.base_model)
        now = await self._now()
        token = request.token or ResumeToken(now, None if request.skip_snapshot else ("", ""))
        if token.position.epoch != now.epoch or token.position.revision > now.revision:
            raise compacted(token.position)
        progress = WatchProgress(token.position.revision)
        self.progress.add(progress)
        try:
            async for batch in self._batches(wanted, token, progress, request.is_wanted_only):
                progress.sending_since = time.monotonic()
                yield batch
                progress.sending_since = None
        finally:
            self.progress.discard(progress)

    async def _batches(
        self, wanted: _Wanted, token: ResumeToken, progress: WatchProgress, is_wanted_only: bool
    ) -> AsyncIterator[Batch]:
        if token.snapshot_after is not None:
            async for batch in self._snapshot(wanted, token.position, token.snapshot_after, is_wanted_only):
                yield batch
        is_complete = token.snapshot_after is not None
        async for batch in self._changes(wanted, token.position, progress, is_complete=is_complete):
            yield batch

    async def _now(self) -> Position:
        """After everything that was committed before; the log's reader has come as far."""
        async with self._history_reads:
            state = await self._database.read(records.log_state)
        await self._reach(state.revision)
        return Position(state.epoch, state.revision)

    async def _reach(self, revision: int) -> None:
        if not await self._log.reaches(revision, CATCH_UP_SECONDS):
            raise RegistryUnavailable("the change log cannot be read", retry_after=RETRY_SECONDS)

    async def _snapshot(
        self, wanted: _Wanted, position: Position, after: tuple[str, str], is_wanted_only: bool
    ) -> AsyncIterator[Batch]:
        read = partial(
            records.snapshot_page,
            namespaces=wanted.namespaces,
            base_model=wanted.base_model,
            is_wanted_only=is_wanted_only,
            limit=PAGE_CHANGES,
        )
        is_complete = False
        while not is_complete:
            self._check_serving()
            async with self._history_reads:
                page = await self._database.read(partial(read, after=after))
            is_complete = len(page) < PAGE_CHANGES
            if page:
                after = (page[-1].adapter.namespace, page[-1].adapter.name)
            changes = [LoggedChange(position.revision, record) for record in page]
            yield Batch(changes, ResumeToken(position, None if is_complete else after), True, is_complete)

    async def _changes(
        self, wanted: _Wanted, position: Position, progress: WatchProgress, *, is_complete: bool
    ) -> AsyncIterator[Batch]:
        """Changes after `position`. `is_complete`: that all before is told was said already."""
        is_live, told_at = False, time.monotonic()
        while True:
            self._check_serving()
            changes, through = self._log.recent(position), self._log.position.revision
            if changes is None:
                if is_live:
                    raise WatchTooSlow("the watch reads more slowly than changes come", retry_after=RETRY_SECONDS)
                async with self._history_reads:
                    _, changes, through = await self._log.history(position)
                await self._reach(through)
            position = position._replace(revision=through)
            is_live = is_live or through >= self._log.position.revision
            matching = wanted.of(changes)
            is_silent = time.monotonic() >= told_at + self._heartbeat and self._log.is_current()
            if matching or is_silent or (is_live and not is_complete):
                told_at = time.monotonic()
                yield Batch(matching, ResumeToken(position), is_complete=is_live and not is_complete)
                is_complete = is_complete or is_live
            progress.revision = position.revision
            if is_live:
                await self._log.advance(position.revision, self._heartbeat)

    def _check_serving(self) -> None:
        if self._is_draining:
            raise Draining("this registry ends: watch another one", retry_after=RETRY_SECONDS)


def _readable(caller: Caller, namespace: str) -> frozenset[str] | None:
    """The namespaces that the caller watches; None for all."""
    return frozenset([namespace]) if namespace else caller.namespaces(["reader", "replica"])
