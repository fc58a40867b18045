"""What the adapter process counts, and the loads it has under way. One thread only."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from inference_service.stats import LoadInFlight, Seconds
from shared.errors import Internal, LoraplexError

Phase = Literal["resolve", "fetch", "pack"]


@dataclass
class Load:
    """A load under way. `bytes_done` may grow on another thread."""

    digest: str
    began: float
    phase: str = "FETCHING"
    bytes_done: int = 0
    bytes_total: int = 0

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        self.bytes_done += count


class LoaderCounters:
    """Since the start of the process. See `stats.AdapterStats` for what each one means."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds: dict[str, Seconds] = {phase: Seconds() for phase in ("resolve", "fetch", "pack")}
        self.failures: Counter[str] = Counter()
        self.fetched_bytes = 0
        self._loads: dict[str, Load] = {}

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Counts what goes on inside as one of `phase`, if it succeeds."""
        began = self._clock()
        yield
        self.seconds[phase].add(self._clock() - began)

    @contextmanager
    def loading(self, digest: str) -> Iterator[Load]:
        """A load while it lasts; its failure is counted. One per digest at a time."""
        load = self._loads[digest] = Load(digest, self._clock())
        try:
            yield load
        except LoraplexError as error:
            self.failures[error.reason] += 1
            raise
        except Exception:
            self.failures[Internal.reason] += 1
            raise
        finally:
            del self._loads[digest]

    def loads(self) -> list[LoadInFlight]:
        """Loads under way, the oldest first."""
        now = self._clock()
        return [
            LoadInFlight(
                load.digest,
                load.phase,
                min(load.bytes_done / load.bytes_total, 1.0) if load.bytes_total else 0.0,
                now - load.began,
                load.bytes_done,
                load.bytes_total,
            )
            for load in self._loads.values()
        ]
