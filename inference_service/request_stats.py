"""How the requests of one API process went: what it counts, and the report that the supervisor adds up for metrics."""

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from inference_service.stats import Seconds, TokenCounts
from inference_service.types import REPORT_PREFIX, PromptLogprobs, SequenceDelta, Started
from shared.errors import LoraplexError

REPORT_SECONDS = 1.0
MAX_REFERENCES = 1024  # told at a time; an adapter that many others keep out is told with its next request

Event = Started | PromptLogprobs | SequenceDelta


class RequestStats(msgspec.Struct):
    """Counts since the start of an API process. Times are seconds.

    `first_token`: from a request's arrival. `inter_token`: between tokens of a sequence; tokens that come together
    share the time since the last, and those that come with the first have none. `queue`: until admission, waiting for
    the adapter included. `prefill`: from admission to the first token. `decode`: from there to the last. `inference`:
    both. `total`: from arrival to the end.
    `finished`: requests by how they ended: `stop`, `length`, `abort` (the client went) or `error`.
    """

    first_token: Seconds = msgspec.field(default_factory=Seconds)
    inter_token: Seconds = msgspec.field(default_factory=Seconds)
    queue: Seconds = msgspec.field(default_factory=Seconds)
    prefill: Seconds = msgspec.field(default_factory=Seconds)
    decode: Seconds = msgspec.field(default_factory=Seconds)
    inference: Seconds = msgspec.field(default_factory=Seconds)
    total: Seconds = msgspec.field(default_factory=Seconds)
    tokens: TokenCounts = msgspec.field(default_factory=TokenCounts)
    finished: dict[str, int] = {}


def add_up(counted: Iterable[RequestStats]) -> RequestStats:
    """The sums over several processes."""
    total = RequestStats()
    for stats in counted:
        for name in _HISTOGRAMS:
            _add_seconds(getattr(total, name), getattr(stats, name))
        total.tokens.prompt += stats.tokens.prompt
        total.tokens.generated += stats.tokens.generated
        for reason, count in stats.finished.items():
            total.finished[reason] = total.finished.get(reason, 0) + count
    return total


_HISTOGRAMS = tuple(name for name in RequestStats.__struct_fields__ if name not in ("tokens", "finished"))


def _add_seconds(total: Seconds, more: Seconds) -> None:
    total.sum += more.sum
    total.count += more.count
    total.buckets = [a + b for a, b in zip(total.buckets, more.buckets, strict=True)]


class ApiReport(msgspec.Struct, frozen=True):
    """One line of an API process's standard output, behind REPORT_PREFIX.

    `references`: by digest, how clients named the adapters that they asked for since the last report.
    """

    pid: int
    stats: RequestStats
    references: dict[str, list[str]] = {}


class StreamTimes:
    """The times of one request. `arrival` is of the monotonic clock."""

    def __init__(self, stats: RequestStats, arrival: float) -> None:
        self._stats = stats
        self._arrival = arrival
        self._admitted: float | None = None
        self._first: float | None = None
        self._last: dict[int, float] = {}  # by sequence
        self.reason = "stop"  # of a request whose stop string was found here, there is no other

    def observe(self, event: Event) -> None:
        """The engine's next event, now."""
        now = time.monotonic()
        if isinstance(event, SequenceDelta):
            self._tokens(event, now)
        elif isinstance(event, Started):
            self._admitted = now
            self._stats.queue.add(max(event.queue_seconds + event.adapter_seconds, 0.0))

    def end(self, reason: str) -> None:
        """The request is over."""
        stats, now = self._stats, time.monotonic()
        stats.finished[reason] = stats.finished.get(reason, 0) + 1
        stats.total.add(now - self._arrival)
        if self._admitted is not None and self._first is not None:
            last = max(self._last.values())
            stats.prefill.add(self._first - self._admitted)
            stats.decode.add(last - self._first)
            stats.inference.add(last - self._admitted)

    def _tokens(self, delta: SequenceDelta, now: float) -> None:
        stats, count = self._stats, len(delta.token_ids)
        if delta.finish_reason is not None:
            self.reason = delta.finish_reason
        if not count:
            return
        stats.tokens.generated += count
        last = self._last.get(delta.index)
        self._last[delta.index] = now
        if last is not None:
            stats.inter_token.add((now - last) / count, count)
            return
        if count > 1:  # an engine faster than this process: the later ones came with the first
            stats.inter_token.add(0.0, count - 1)
        if self._first is None:
            self._first = now
            stats.first_token.add(now - self._arrival)


class RequestMeter:
    """Counts the requests of this process."""

    def __init__(self) -> None:
        self.stats = RequestStats()
        self._references: dict[str, dict[str, None]] = {}

    def name(self, digest: str, reference: str) -> None:
        """A client asked for an adapter by this reference."""
        if len(self._references) < MAX_REFERENCES or digest in self._references:
            self._references.setdefault(digest, {})[reference] = None

    @contextmanager
    def stream(self, arrival: float, num_prompt: int) -> Iterator[StreamTimes]:
        """Counts one request that goes to the engine, however it ends."""
        self.stats.tokens.prompt += num_prompt
        times = StreamTimes(self.stats, arrival)
        reason = "abort"
        try:
            yield times
            reason = times.reason
        except LoraplexError:
            reason = "error"
            raise
        finally:
            times.end(reason)

    def report(self) -> ApiReport:
        """What has been counted, and the references since the last report."""
        named, self._references = self._references, {}
        return ApiReport(os.getpid(), self.stats, {digest: list(names) for digest, names in named.items()})


async def keep_reporting(meter: RequestMeter) -> None:
    """Write a report to standard output each second in which there is news, until cancelled."""
    last = b""
    while True:
        line = msgspec.json.encode(meter.report())
        if line != last:
            sys.stdout.write(f"{REPORT_PREFIX}{line.decode()}\n")
            sys.stdout.flush()
            last = line
        await asyncio.sleep(REPORT_SECONDS)
