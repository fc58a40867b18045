"""One attempt at a time per key, shared by all who ask for it meanwhile; failures are remembered for a moment."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared.errors import ErrorRecord, Internal, LoraplexError, from_record

T = TypeVar("T")

MAX_REMEMBERED = 10_000

log = logging.getLogger(__name__)


class Flights(Generic[T]):
    """Attempts in the air by key.

    Args:
        memory: Seconds for which a failure is given to everyone who asks again, without a new attempt. If it may pass
            by itself, its `retry_after` says how many are left.
        clock: Seconds, monotonic.
    """

    def __init__(self, memory: Callable[[LoraplexError], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[T | ErrorRecord]] = {}
        self._failures: dict[str, tuple[float, ErrorRecord]] = {}  # until when, in order of failing

    async def run(self, key: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the attempt for `key` in the air, else of a new one.

        An attempt goes on when those who wait for it are cancelled.

        Raises:
            LoraplexError: what the attempt raised, now or a moment ago; `Internal` for anything unforeseen.
        """
        task = self._tasks.get(key)
        if task is None:
            self._raise_remembered(key)
            task = self._tasks[key] = asyncio.get_running_loop().create_task(self._fly(key, attempt))
        outcome = await asyncio.shield(task)
        if isinstance(outcome, ErrorRecord):
            raise from_record(outcome)
        return outcome

    async def _fly(self, key: str, attempt: Callable[[], Awaitable[T]]) -> T | ErrorRecord:
        try:
            return await attempt()
        except LoraplexError as error:
            return self._remember(key, error)
        except Exception as error:
            return self._remember(key, unforeseen(error, key))
        finally:
            del self._tasks[key]

    def _remember(self, key: str, error: LoraplexError) -> ErrorRecord:
        now = self._clock()
        self._failures.pop(key, None)
        while self._failures:
            oldest = next(iter(self._failures))
            if self._failures[oldest][0] > now and len(self._failures) < MAX_REMEMBERED:
                break
            del self._failures[oldest]
        record, seconds = error.record(), self._memory(error)
        if seconds <= 0:
            return record
        self._failures[key] = (now + seconds, record)
        return _not_before(seconds, record)

    def _raise_remembered(self, key: str) -> None:
        until, record = self._failures.get(key, (0.0, None))
        if record is not None and (left := until - self._clock()) > 0:
            raise from_record(_not_before(left, record))


def _not_before(seconds: float, record: ErrorRecord) -> ErrorRecord:
    """The failure for someone who would only hear it again within `seconds`."""
    error = from_record(record)
    error.stands_for(max(seconds, record.retry_after or 0.0))
    return error.record()


def unforeseen(error: Exception, what: str) -> Internal:
    """The error to show for an exception that nobody foresaw; its text goes to the log only."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s in %s", error_id, what, exc_info=error)
    return Internal(f"internal error (id {error_id})", metadata={"id": error_id})
