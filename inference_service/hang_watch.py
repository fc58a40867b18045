"""When a process hangs: it was ready, and for too long has answered nothing. Plain time and counts."""

import time
from collections.abc import Callable

TICK_SECONDS = 0.5
LEAST_TIMEOUT = 3.0  # a process is asked each second, and again where a question was lost
_LONGEST_TICK = 2 * TICK_SECONDS


class HangWatch:
    """Of one process at a time. Call `tick` every `TICK_SECONDS`.

    Silence is counted in ticks and not by the clock, which goes on while this process itself is suspended, with those
    that it watches or without them: a tick counts `_LONGEST_TICK` at most, however late it comes.

    Args:
        timeout: Seconds of silence that make a hang.
        clock: Seconds.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._ticked_at = clock()
        self._silence = 0.0

    def tick(self, *, is_up: bool, has_answered: bool) -> bool:
        """Whether the process hangs now; it is then taken for another one.

        `is_up`: its start is over and it has not ended since. `has_answered`: since the last tick.
        """
        now = self._clock()
        elapsed, self._ticked_at = now - self._ticked_at, now
        self._silence = self._silence + min(elapsed, _LONGEST_TICK) if is_up and not has_answered else 0.0
        is_hung = self._silence >= self._timeout
        if is_hung:
            self._silence = 0.0
        return is_hung
