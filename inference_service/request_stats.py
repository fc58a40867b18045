"""How the requests of one API process went: what it counts, and the report that the supervisor adds up for metrics."""

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from grpc import StatusCode

from inference_service.stats import Seconds, TokenCounts
from inference_service.types import REPORT_PREFIX, PromptLogprobs, SequenceDelta, Started
from shared.call_observers import EndCall
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
    `wait_files`: until an adapter's files were on this machine. `wait_adapter`: in the queue, until it was on the
    device. `wait_capacity`: in the queue, for anything else.
    `finished`: requests by how they ended: `stop`, `length`, `abort` (the client went) or `error`; those that never
    reached the engine are not among them.
    `errors`: requests that failed or were refused, by the error's reason.
    `calls`: of every RPC, by its name and gRPC's code with a space between; those that were not let in are among them.
    """

    first_token: Seconds = msgspec.field(default_factory=Seconds)
    inter_token: Seconds = msgspec.field(default_factory=Seconds)
    queue: Seconds = msgspec.field(default_factory=Seconds)
    prefill: Seconds = msgspec.field(default_factory=Seconds)
    decode: Seconds = msgspec.field(default_factory=Seconds)
    inference: Seconds = msgspec.field(default_factory=Seconds)
    total: Seconds = msgspec.field(default_factory=Seconds)
    wait_files: Seconds = msgspec.field(default_factory=Seconds)
    wait_adapter: Seconds = msgspec.field(default_factory=Seconds)
    wait_capacity: Seconds = msgspec.field(default_factory=Seconds)
    tokens: TokenCounts = msgspec.field(default_factory=TokenCounts)
    finished: dict[str, int] = {}
    errors: dict[str, int] = {}
    calls: dict[str, int] = {}


def add_up(counted: Iterable[RequestStats]) -> RequestStats:
    """The sums over several processes."""
    total = RequestStats()
    for stats in counted:
        for name in _HISTOGRAMS:
            _add_seconds(getattr(total, name), getattr(stats, name))
        total.tokens.prompt += stats.tokens.prompt
        total.tokens.generated += stats.tokens.generated
        for name in _BY_REASON:
            counts = getattr(total, name)
            for reason, count in getattr(stats, name).items():
                counts[reason] = counts.get(reason, 0) + count
    return total


_BY_REASON = ("finished", "errors", "calls")
_HISTOGRAMS = tuple(name for name in RequestStats.__struct_fields__ if name not in ("tokens", *_BY_REASON))


def _add_seconds(total: Seconds, more: Seconds) -> None:
    total.sum += more.sum
    total.count += more.count
    total.buckets = [a + b for a, b in zip(total.buckets, more.buckets, strict=True)]
    total.longest = max(total.longest, more.longest)


class ApiReport(msgspec.Struct, frozen=True):
    """One line of an API process's standard output, behind REPORT_PREFIX.

    `references`: by digest, how clients named the adapters that they asked for since the last report.
    """

    pid: int
    stats: RequestStats
    references: dict[str, list[str]] = {}


class StreamTimes:
    """The times of one request, of the monotonic clock: when it came, and when it was sent to the engine."""

    def __init__(self, stats: RequestStats, arrival: float, submitted: float) -> None:
        self._stats = stats
        self._arrival = arrival
        self._submitted = submitted
        self._last: dict[int, float] = {}  # by sequence
        self.started: Started | None = None
        self.admitted: float | None = None
        self.first: float | None = None  # token
        self.reason = "stop"  # of a request whose stop string was found here, there is no other

    @property
    def last(self) -> float:
        """When the last token came, once there is one."""
        return max(self._last.values())

    def observe(self, event: Event) -> None:
        """The engine's next event, now."""
        now = time.monotonic()
        if isinstance(event, SequenceDelta):
            self._tokens(event, now)
        elif isinstance(event, Started):
            waited = event.queue_seconds + event.adapter_seconds
            self.started, self.admitted = event, min(self._submitted + waited, now)
            self._stats.queue.add(waited)
            self._stats.wait_adapter.add(event.adapter_seconds)
            self._stats.wait_capacity.add(event.queue_seconds)

    def end(self, reason: str) -> None:
        """The request is over."""
        stats, now = self._stats, time.monotonic()
        stats.finished[reason] = stats.finished.get(reason, 0) + 1
        stats.total.add(now - self._arrival)
        if self.admitted is not None and self.first is not None:
            last = self.last
            stats.prefill.add(self.first - self.admitted)
            stats.decode.add(last - self.first)
            stats.inference.add(last - self.admitted)

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
        if self.first is None:
            self.first = now
            stats.first_token.add(now - self._arrival)


class RequestMeter:
    """Counts the requests of this process, and as a `CallObserver` all calls."""

    def __init__(self) -> None:
        self.stats = RequestStats()
        self._references: dict[str, dict[str, None]] = {}

    def name(self, digest: str, reference: str) -> None:
        """A client asked for an adapter by this reference."""
        if len(self._references) < MAX_REFERENCES or digest in self._references:
            self._references.setdefault(digest, {})[reference] = None

    @contextmanager
    def stream(
        self, arrival: float, *, prepare_seconds: float, submitted: float, num_prompt: int
    ) -> Iterator[StreamTimes]:
        """Counts one request that goes to the engine, however it ends. `prepare_seconds`: until its files were here."""
        self.stats.tokens.prompt += num_prompt
        self.stats.wait_files.add(prepare_seconds)
        times = StreamTimes(self.stats, arrival, submitted)
        reason = "abort"
        try:
            yield times
            reason = times.reason
        except LoraplexError:
            reason = "error"
            raise
        finally:
            times.end(reason)

    def begin(self, method: str, context: Any) -> EndCall:
        """A call begins."""
        rpc = method.rpartition("/")[2]

        def end(code: StatusCode) -> None:
            call = f"{rpc} {code.name}"
            self.stats.calls[call] = self.stats.calls.get(call, 0) + 1

        return end

    def ended(self, error: str) -> None:
        """A request has ended, whether or not the engine heard of it; `error`: its reason, if it was not answered."""
        if error:
            self.stats.errors[error] = self.stats.errors.get(error, 0) + 1

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
