"""`make bench-soak`: twice the load that can be answered, and whether any process grows.

What can be answered is measured first. Then requests come at twice that rate for `--minutes`, for twice as many
adapters as fit on the device, so that they are loaded and evicted all the while; about every other request must be
refused with QUEUE_FULL. The resident memory of every process is sampled, and a line is fitted to it: the means of
twenty parts of the time, after a warm-up, with the confidence that those twenty allow. A process that is not shown to
grow by less than `--bound`, with a confidence of 95 %, fails the run; so does an answer that is cut, an error other
than a refusal, or a machine that became so much faster meanwhile that it was no overload. A run of less than five
minutes is no proof: memory settles and the queue fills in that time, so only errors and answers that were cut fail it.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from examples.stack import Stack
from loraplex import Client
from tests.bench.capacity import SETTINGS, Asks, Setting, capacity, model_config, serving
from tests.bench.load import arrivals
from tests.bench.open_loop import quantile
from tests.bench.streams import Ask, ClientProcesses, Seen, stream

NUM_ADAPTERS, SLOTS = 16, 8
KV_STEPS = 2  # room for keys and values, in requests of every stream: all of it was in use before samples count
OVERLOAD = 2.0
SAMPLE_SECONDS = 1.0  # at most: in a short run, so that each part has some
SAMPLES_A_PART = 3
WARM_UP = 0.2  # of the time, before the samples that count: caches fill, Python's and glibc's heaps settle
PARTS = 20
T_QUANTILE = 1.734  # Student's, one-sided 95 %, 18 degrees of freedom
REFUSED = {"QUEUE_FULL"}
LEAST_MINUTES = 0.2
PROVES_SECONDS = 300.0  # a shorter run says nothing about growth by the hour
LEAST_REFUSED = 0.2  # of all requests; half of them are too many
MIB = 1 << 20


class Fit(NamedTuple):
    """A line through samples of a process's memory: bytes an hour, how far that may be off, and the mean in bytes."""

    slope: float
    error: float
    mean: float

    def exceeds(self, bound: float) -> bool:
        """Whether it grows by more than `bound` bytes an hour, with a confidence of 95 %."""
        return self.slope - self.error > bound

    def is_within(self, bound: float) -> bool:
        """Whether it grows by less than that, with the same confidence. Where neither is so, a longer run tells."""
        return self.slope + self.error <= bound

    def verdict(self, bound: float) -> str:
        """What is wrong with it; empty: nothing."""
        if self.is_within(bound):
            return ""
        words = "grows" if self.exceeds(bound) else "may grow, a longer run tells:"
        return f"{words} by {self.slope / MIB:+.1f} ± {self.error / MIB:.1f} MiB an hour"


def fit(seconds: Sequence[float], nbytes: Sequence[float], parts: int = PARTS) -> Fit:
    """The line through the means of `parts` equal parts: samples that follow each other say almost the same.

    Raises:
        ValueError: there are fewer samples than parts.
    """
    if len(seconds) < parts:
        raise ValueError(f"{len(seconds)} samples cannot be divided into {parts} parts")
    edges = [round(number * len(seconds) / parts) for number in range(parts + 1)]
    spans = [slice(begin, end) for begin, end in pairwise(edges)]
    x = [statistics.fmean(seconds[span]) / 3600 for span in spans]
    y = [statistics.fmean(nbytes[span]) for span in spans]
    slope, level = statistics.linear_regression(x, y)
    rest = sum((value - level - slope * hours) ** 2 for hours, value in zip(x, y, strict=True))
    spread = sum((hours - statistics.fmean(x)) ** 2 for hours in x)
    error = (rest / (parts - 2) / spread) ** 0.5
    return Fit(slope, T_QUANTILE * error, statistics.fmean(y))


class Sample(NamedTuple):
    """A process at one moment."""

    seconds: float
    resident: int
    descriptors: int


class Processes:
    """Both services' processes by what they do, and their samples."""

    def __init__(self, stack: Stack) -> None:
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self._processes: dict[str, psutil.Process] = {}
        for server in (stack.registry, stack.inference):
            assert server.process is not None
            process = psutil.Process(server.process.pid)
            for each in (process, *process.children(recursive=True)):
                self._processes[self._name(each)] = each

    def _name(self, process: psutil.Process) -> str:
        """Its module, and a number if it is one of several."""
        command = process.cmdline()
        module = command[command.index("-m") + 1] if "-m" in command else command[0]
        name = module.removeprefix("inference_service.").removesuffix(".process")
        return name if name not in self._processes else f"{name} ({process.pid})"

    def sample(self, seconds: float) -> None:
        """Raises psutil.NoSuchProcess: one of them is gone."""
        for name, process in self._processes.items():
            self.samples[name].append(Sample(seconds, process.memory_info().rss, process.num_fds()))


class Outcome(NamedTuple):
    """What a soak has found. `seen`: the requests in the order in which they were due."""

    seconds: float
    rate: float
    samples: Mapping[str, Sequence[Sample]]
    seen: Sequence[Seen]

    def fits(self) -> dict[str, Fit]:
        """The line of every process, of the samples after the warm-up."""
        found = {}
        for name, samples in self.samples.items():
            counted = [sample for sample in samples if sample.seconds >= WARM_UP * self.seconds]
            found[name] = fit([s.seconds for s in counted], [s.resident for s in counted])
        return found

    def quarter(self, number: int) -> list[float]:
        """Milliseconds until the first token of what was answered of this quarter's requests (0 to 3), sorted."""
        share = len(self.seen) / 4
        part = self.seen[int(number * share) : int((number + 1) * share)]
        return sorted(1e3 * (each.arrivals[0] - each.ask.at) for each in part if each.arrivals)

    def failures(self, bound: float) -> list[str]:
        """What must not be. Growth and too little load count only where the run is long enough to prove them."""
        is_proof = self.seconds >= PROVES_SECONDS
        verdicts = {name: line.verdict(bound) for name, line in self.fits().items()} if is_proof else {}
        grown = [f"{name} {verdict}" for name, verdict in verdicts.items() if verdict]
        errors = Counter(each.error for each in self.seen if each.error)
        unexpected = [f"{count} × {reason}" for reason, count in errors.items() if reason not in REFUSED]
        cut = [each for each in self.seen if not each.error and len(each.arrivals) != each.ask.output]
        refused = sum(errors[reason] for reason in REFUSED)
        found = [*grown, *unexpected, *([f"{len(cut)} answers were cut"] if cut else [])]
        if is_proof and refused < LEAST_REFUSED * len(self.seen):
            found.append(f"it was no overload: {refused} of {len(self.seen)} requests were refused")
        return found


def most_rows(setting: Setting) -> int:
    """Tokens of the largest step: few, so that every size can come before samples count."""
    return 4 * setting.streams


def each_size(asks: Asks, rows: int) -> list[Ask]:
    """A request of each number of rows that a step can have: what libraries keep for a size they keep from then on."""
    return [asks.next()._replace(prompt=number, output=1) for number in range(1, rows + 1)]


async def soak(setting: Setting, folder: Path, seconds: float) -> Outcome:
    """Start the services, find out what they can answer, and ask for twice that."""
    names = [f"bench-{number}" for number in range(NUM_ADAPTERS)]
    kv_bytes = KV_STEPS * setting.streams * (setting.prompt + setting.output) * _token_bytes(setting)
    flags = [
        f"--max-adapters={SLOTS}",
        f"--max-queue={2 * setting.streams}",
        f"--kv-cache-memory={kv_bytes}",
        f"--max-batched-tokens={most_rows(setting)}",
    ]
    async with serving(setting, folder, names, *flags) as (stack, client):
        asks = Asks(setting, names)
        clients = ClientProcesses(stack.inference.address, setting.clients, model_config(setting).vocab_size)
        try:
            await clients.run(each_size(asks, most_rows(setting)), 1)
            # A line as long as a step, so that a free seat finds somebody whose adapter is on the device.
            most = await capacity(clients, asks, 2 * setting.streams, rounds=2)
        finally:
            clients.close()
        print(f"{most:.2f} requests/s can be answered; {OVERLOAD * most:.2f} come", flush=True)
        processes = Processes(stack)
        began = time.monotonic()
        due = [asks.next(began + at) for at in arrivals(OVERLOAD * most, seconds, 0)]
        sampling = asyncio.create_task(_sample(processes, began, seconds))
        seen = await asyncio.gather(_ask(client, setting, due), sampling)
        return Outcome(seconds, OVERLOAD * most, processes.samples, seen[0])


def _token_bytes(setting: Setting) -> int:
    """Keys and values of a token: float32 on a CPU, else half of it."""
    model = model_config(setting)
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * (4 if "--dtype=float32" in setting.flags else 2)


async def _ask(client: Client, setting: Setting, due: Sequence[Any]) -> list[Seen]:
    """Sends each at its time, whatever became of those before."""
    vocab, running = model_config(setting).vocab_size, []
    for ask in due:
        await asyncio.sleep(max(ask.at - time.monotonic(), 0.0))
        running.append(asyncio.create_task(stream(client, ask, vocab)))
    return list(await asyncio.gather(*running))


def sample_pause(seconds: float) -> float:
    """Seconds between two samples of a run, so that there are some in each part after the warm-up."""
    return min(SAMPLE_SECONDS, seconds * (1 - WARM_UP) / (PARTS * SAMPLES_A_PART))


async def _sample(processes: Processes, began: float, seconds: float) -> None:
    pause = sample_pause(seconds)
    while (elapsed := time.monotonic() - began) < seconds:
        processes.sample(elapsed)
        await asyncio.sleep(pause)


def show(outcome: Outcome) -> None:
    """The figures as tables."""
    memory = Table("process", "MiB", "MiB an hour", "± (95 %)", "descriptors, first and last")
    for name, line in outcome.fits().items():
        samples = outcome.samples[name]
        memory.add_row(
            name,
            f"{line.mean / MIB:.1f}",
            f"{line.slope / MIB:+.1f}",
            f"{line.error / MIB:.1f}",
            f"{samples[0].descriptors}, {samples[-1].descriptors}",
        )
    errors = Counter(each.error for each in outcome.seen if each.error)
    answered = sum(not each.error for each in outcome.seen)
    console = Console()
    console.print(f"{len(outcome.seen)} requests in {outcome.seconds:.0f} s: {answered} answered, {dict(errors)}")
    for number, name in ((0, "first"), (3, "last")):
        values = outcome.quarter(number)
        p50, p99 = quantile(values, 0.5), quantile(values, 0.99)
        console.print(f"first token, {name} quarter: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    console.print(memory)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not LEAST_MINUTES <= minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is too short; the shortest that works is {LEAST_MINUTES:g}")
    return minutes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=SETTINGS)
    parser.add_argument(
        "--minutes",
        default=15.0,
        type=_minutes,
        help=f"of load, behind minutes of setting up; at least {LEAST_MINUTES:g}",
    )
    parser.add_argument("--bound", default=32.0, type=float, help="MiB an hour that a process may grow")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        outcome = asyncio.run(soak(SETTINGS[arguments.device], Path(folder), 60 * arguments.minutes))
    show(outcome)
    failures = outcome.failures(arguments.bound * MIB)
    passed = f"no process grows by more than {arguments.bound:g} MiB an hour"
    if outcome.seconds < PROVES_SECONDS:
        passed = f"nothing failed; {outcome.seconds:g} s prove nothing about growth, {PROVES_SECONDS:g} or more do"
    print("; ".join(failures) or passed)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: line._asdict() for name, line in outcome.fits().items()}
        found = {"rate": outcome.rate, "fits": rows, "failures": failures, "samples": outcome.samples}
        arguments.json.write_text(json.dumps(found))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
