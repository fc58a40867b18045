"""How long a request will wait at least, so that one which cannot be in time is refused while its caller can still go
elsewhere. Torch-free.

The estimate is meant to be too short rather than too long: a refusal that was wrong costs an answer, one that was
missed costs only what the deadline costs anyway. So of those ahead only they count that certainly go first, those of
the same tenant and adapter (`FairQueue.num_ahead`); the rate is that of everybody's starts; and twice as many may start
from now on. Where nothing was measured, nothing is refused.
"""

from collections import deque

from shared.errors import DeadlineUnreachable

WINDOW = 64  # starts that the rate is taken from
LEAST_STARTS, LEAST_SECONDS = 16, 1.0  # to call it a rate
MARGIN = 2.0


class WaitEstimate:
    """The rate at which sequences start while others, whose adapters are there, wait for room. Times are seconds."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=WINDOW)

    def started(self, now: float) -> None:
        """A sequence has started."""
        self._starts.append(now)

    def forget(self) -> None:
        """Nobody waits for room: how often one starts is how often one comes, and says nothing of the next queue."""
        self._starts.clear()

    def seconds(self, num_ahead: int, now: float) -> float:
        """The least time until `num_ahead` sequences have started; 0 where it is not known."""
        if len(self._starts) < LEAST_STARTS:
            return 0.0
        span = now - self._starts[0]
        return num_ahead * span / (len(self._starts) * MARGIN) if span >= LEAST_SECONDS else 0.0

    def check(self, deadline: float, num_ahead: int, now: float) -> None:
        """Returns unless a request behind `num_ahead` sequences will not even start before its deadline.

        Raises:
            DeadlineUnreachable: with the seconds after which those have started, as far as is known.
        """
        seconds = self.seconds(num_ahead, now)
        if now + seconds >= deadline:
            left = max(0.0, deadline - now)
            raise DeadlineUnreachable(
                f"{num_ahead} sequences are ahead, for {seconds:.3g} seconds or more; the deadline is in {left:.3g}",
                metadata={"estimated_wait_seconds": f"{seconds:.3f}"},
                retry_after=seconds or None,
            )
