"""What adapters that come and go cost those that stay: the whole service under the named loads, through gRPC.

    gaps         32 streams decode on resident adapters while one more request a second arrives, whose adapter is
                 resident or cold: the gaps between tokens of the 32, cold beside resident.
    working-set  64, 256 and 1,000 adapters, uniform and Zipf(1.0), on an arena for 32.
    swap         16 adapters on an arena for 8, four requests a second, beside 8 adapters that are resident; and what a
                 load takes, cold and from host memory, beside reading and hashing the file and the bare copy.
    long-swap    the same with 4,096 tokens in and 2,048 out, where adapters make room only at the age limit.

On a GPU the model has Llama-3.1-8B's shape and random weights; on a CPU it is SmolLM2-135M-Instruct. Adapters are
random.
"""

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from examples.stack import MODEL, Stack, register, wait_for_base_model
from loraplex import Client
from loraplex.inference.v1 import control_pb2
from shared.base_model import MODULES, ModelConfig, linear_shape, parse_config
from shared.model_folder import load_raw_config
from tests.bench.random_adapters import write_adapters
from tests.bench.shapes import SHAPES, write_model
from tests.bench.streams import Ask, ClientProcesses, Seen

BASE_MODEL = "bench"
REGISTRATIONS = 8  # at a time
QV = ("q_proj", "v_proj")
LONG = 7000  # tokens of a stream that is ended by its client
AGE_LIMIT = 5.0  # seconds, of long-swap


class Setting(NamedTuple):
    """Sizes that fit the device.

    Attributes:
        model: What is served, and what its folder holds.
        folder: Of the model.
        flags: Of the inference service, beside the memory's.
        rank, modules: Of every adapter.
        clients: Client processes.
        streams: That decode all the time.
        scale: Of the loads' numbers of requests and tokens: a CPU does less.
        sizes: Of working sets.
    """

    model: ModelConfig
    folder: Path
    flags: tuple[str, ...]
    rank: int
    modules: tuple[str, ...]
    clients: int
    streams: int
    scale: float
    sizes: tuple[int, ...] = (64, 256, 1000)

    @property
    def adapter_bytes(self) -> int:
        """On the device, with room for the rounding of each layer's chunk."""
        size = 4 if "--dtype=float32" in self.flags else 2
        per_layer = sum(sum(linear_shape(self.model, MODULES.index(name))) for name in self.modules)
        return (size * self.rank * per_layer + 256) * self.model.num_layers


def on_gpu(folder: Path) -> Setting:
    """Llama-3.1-8B's shape, rank 16 on all linears."""
    write_model(folder / "model", "llama-3.1-8b", with_weights=False)
    flags = (
        "--device=cuda", "--load-format=dummy", "--dtype=bfloat16", "--max-model-len=8192", "--api-processes=2",
        f"--kernel-cache-dir={folder}/kernels",
    )  # fmt: skip
    return Setting(parse_config(SHAPES["llama-3.1-8b"]), folder / "model", flags, 16, MODULES, 8, 32, 1.0)


def on_cpu(_folder: Path) -> Setting:
    """SmolLM2, rank 8 on all linears; fewer and shorter requests."""
    model = parse_config(load_raw_config(MODEL))
    return Setting(model, MODEL, ("--device=cpu", "--dtype=float32", "--max-model-len=8192"), 8, MODULES, 1, 4, 0.1)


@asynccontextmanager
async def service(
    setting: Setting, store: Path, arena_adapters: int, host_adapters: int, *more: str
) -> AsyncIterator[tuple[Client, ClientProcesses]]:
    """Both services over `store`, with memory for so many adapters of the setting."""
    memory = (
        f"--adapter-memory={max(arena_adapters * setting.adapter_bytes, 1 << 20)}",
        f"--host-memory={max(host_adapters * setting.adapter_bytes, 1 << 20)}",
        "--max-adapters=512",
    )
    with tempfile.TemporaryDirectory(prefix="loraplex-churn-") as run:
        flags = [f"--model-name={BASE_MODEL}", *setting.flags, *memory, *more]
        stack = Stack(Path(run), flags=flags, model=setting.folder, roots={"store": store})
        async with stack, stack.client() as client:
            await wait_for_base_model(client, BASE_MODEL)
            processes = ClientProcesses(stack.inference.address, setting.clients, setting.model.vocab_size)
            try:
                yield client, processes
            finally:
                processes.close()


async def register_all(client: Client, names: Sequence[str]) -> float:
    """Register every name; seconds for all."""
    turn = asyncio.Semaphore(REGISTRATIONS)
    started = time.perf_counter()

    async def one(name: str) -> None:
        async with turn:
            await register(client, name, f"file://store/{name}", BASE_MODEL)

    await asyncio.gather(*(one(name) for name in names))
    return time.perf_counter() - started


async def load(client: Client, name: str) -> None:
    """Have an adapter READY."""
    request = control_pb2.LoadAdapterRequest(reference=name, wait=True)
    await client.call(client.control.LoadAdapter(request))


# ---- gaps


async def gaps(setting: Setting, folder: Path) -> dict[str, Any]:
    """The 32 streams' gaps while cold adapters arrive, beside the same with resident ones, in one run, in turn."""
    rounds, seconds = 2, max(4, round(10 * setting.scale**0.5))
    resident = [f"warm-{n}" for n in range(8)]
    cold = [f"cold-{n}" for n in range(rounds * seconds)]
    store = folder / "gaps"
    write_adapters(store, [*resident, *cold], setting.model, setting.rank, setting.modules)
    found: dict[str, list[list[float]]] = {"resident": [], "cold": []}
    firsts: dict[str, list[float]] = {"resident": [], "cold": []}
    async with service(setting, store, len(resident) + len(cold) + 2, len(resident) + len(cold) + 2) as (client, run):
        await register_all(client, [*resident, *cold])
        for name in resident:
            await load(client, name)
        await run.run([Ask("", 8, 2, n) for n in range(4 * setting.clients)])  # starts the client processes
        fresh = iter(cold)
        for turn in range(2 * rounds):
            kind = ("resident", "cold")[turn % 2]
            start = time.monotonic() + 2.0
            arrivals = [
                Ask(next(fresh) if kind == "cold" else resident[i % 8], 64, 8, 10_000 * turn + i, at=start + i)
                for i in range(seconds)
            ]
            steady = await _steady(setting, run, resident, turn, start + seconds, arrivals)
            found[kind] += [_gaps_within(steady, seen.sent, seen.sent + 0.95) for seen in steady.arrivals]
            firsts[kind] += [seen.first_token_seconds for seen in steady.arrivals]
    return _gap_report(found, firsts)


class Steady(NamedTuple):
    streams: list[Seen]
    arrivals: list[Seen]


async def _steady(
    setting: Setting, run: ClientProcesses, adapters: Sequence[str], turn: int, end: float, arrivals: list[Ask]
) -> Steady:
    """Streams that decode until `end`, and the requests that arrive meanwhile."""
    asks = [Ask(adapters[n % len(adapters)], 64, LONG, 1_000 * turn + n, until=end) for n in range(setting.streams)]
    seen = await run.run([*asks, *arrivals], at_a_time=setting.clients * (len(asks) + len(arrivals)))
    assert not [s for s in seen if s.error], [s.error for s in seen if s.error][:3]
    return Steady([s for s in seen if s.ask.output == LONG], [s for s in seen if s.ask.output != LONG])


def _gaps_within(steady: Steady, begin: float, end: float) -> list[float]:
    """Every gap between tokens of the steady streams that ends in this window."""
    return [
        later - earlier
        for seen in steady.streams
        for earlier, later in zip(seen.arrivals, seen.arrivals[1:], strict=False)
        if begin < later <= end
    ]


def _gap_report(found: dict[str, list[list[float]]], firsts: dict[str, list[float]]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for kind, windows in found.items():
        every = sorted(gap for window in windows for gap in window)
        report[kind] = {
            "p50 ms": 1e3 * quantile(every, 0.5),
            "p99.9 ms": 1e3 * quantile(every, 0.999),
            "median of worst ms": 1e3 * statistics.median(max(window) for window in windows if window),
            "first token ms": 1e3 * statistics.median(firsts[kind]),
        }
    report["ratio p99.9"] = report["cold"]["p99.9 ms"] / report["resident"]["p99.9 ms"]
    report["ratio worst"] = report["cold"]["median of worst ms"] / report["resident"]["median of worst ms"]
    return report


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of a sorted sequence."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


# ---- more adapters than room


async def working_sets(setting: Setting, folder: Path) -> dict[str, Any]:
    """Goodput, first tokens and loads by the size of the working set."""
    report: dict[str, Any] = {}
    sizes = setting.sizes
    names = [f"set-{n}" for n in range(max(sizes))]
    small = setting._replace(rank=8, modules=QV)
    store = folder / "sets"
    write_adapters(store, names, small.model, small.rank, small.modules)
    async with service(small, store, 32, 300) as (client, run):
        report["register, s per adapter"] = await register_all(client, names) / len(names)
        for size in sizes:
            for zipf in (False, True):
                label = f"{size} {'zipf' if zipf else 'uniform'}"
                report[label] = await _working_set(small, client, run, names[:size], zipf)
    return report


async def _working_set(
    setting: Setting, client: Client, run: ClientProcesses, names: Sequence[str], zipf: bool
) -> dict[str, float]:
    chooser = random.Random(len(names) + zipf)
    weights = [1 / (rank + 1) if zipf else 1.0 for rank in range(len(names))]
    count = max(40, round(400 * setting.scale))
    picks = chooser.choices(names, weights, k=count)
    output = max(8, round(32 * setting.scale**0.5))
    seeds = chooser.randrange(1 << 20)
    before = await status(client)
    started = time.monotonic()
    seen = await run.run([Ask(name, 128, output, seeds + n) for n, name in enumerate(picks)], at_a_time=setting.streams)
    seconds = time.monotonic() - started
    return _summary(seen, seconds) | _loads(before, await status(client), count)


# ---- swapping


class Rate(NamedTuple):
    """Requests that arrive evenly: so many a second, in all, tokens in and out."""

    per_second: float
    requests: int
    prompt: int
    output: int


async def swaps(setting: Setting, folder: Path) -> dict[str, Any]:
    """16 adapters on an arena for 8, beside 8; four requests a second, host tier warm."""
    rate = Rate(4.0, 48, 512, 128) if setting.scale == 1 else Rate(1.0, 20, 64, 16)
    names = _swapped(setting, folder / "swaps")
    async with service(setting, folder / "swaps", 8, 20) as (client, run):
        await register_all(client, names)
        report: dict[str, Any] = {
            "load": await _loading(client, names, folder / "swaps" / names[0] / "adapter_model.safetensors")
        }
        for label, pool in (("resident", names[:8]), ("16 on 8", names), ("resident again", names[:8])):
            report[label] = await _at_rate(client, run, label, pool, rate)
    report["ratio of median first tokens"] = report["16 on 8"]["first token p50 ms"] / min(
        report[label]["first token p50 ms"] for label in ("resident", "resident again")
    )
    return report


async def long_swaps(setting: Setting, folder: Path) -> dict[str, Any]:
    """The same with long prompts and answers: every adapter in the arena is in use until the age limit frees one."""
    rate = Rate(4.0, 48, 4096, 2048) if setting.scale == 1 else Rate(1.0, 20, 256, 128)
    names = _swapped(setting, folder / "long-swaps")
    async with service(setting, folder / "long-swaps", 8, 20, f"--adapter-age-limit={AGE_LIMIT}") as (client, run):
        await register_all(client, names)
        for name in names:
            await load(client, name)  # into the host tier
        report: dict[str, Any] = {"age limit s": AGE_LIMIT}
        for label, pool in (("resident", names[:8]), ("16 on 8", names)):
            report[label] = await _at_rate(client, run, label, pool, rate)
    report["ratio of goodput"] = report["16 on 8"]["tok/s"] / report["resident"]["tok/s"]
    return report


def _swapped(setting: Setting, store: Path) -> list[str]:
    """Names of 16 adapters that are written to `store`."""
    names = [f"swap-{n}" for n in range(16)]
    write_adapters(store, names, setting.model, setting.rank, setting.modules)
    return names


async def _at_rate(
    client: Client, run: ClientProcesses, label: str, pool: Sequence[str], rate: Rate
) -> dict[str, float]:
    """Requests for adapters of `pool` at random, eight of which are on the device when the first one comes."""
    for name in pool[:8]:
        await load(client, name)
    chooser = random.Random(f"{label} {rate}")  # other prompts each time, or they would be cached
    start = time.monotonic() + 1.0
    asks = [
        Ask(chooser.choice(pool), rate.prompt, rate.output, chooser.randrange(1 << 24), at=start + n / rate.per_second)
        for n in range(rate.requests)
    ]
    before = await status(client)
    seen = await run.run(asks)
    return _summary(seen, time.monotonic() - start) | _loads(before, await status(client), rate.requests)


async def _loading(client: Client, names: Sequence[str], file: Path) -> dict[str, float]:
    """Milliseconds a load by phase, nothing else running: every adapter cold, then from host memory, one at a time."""
    before = await status(client)
    for name in names:
        await load(client, name)
    cold = await status(client)
    for name in names:
        await load(client, name)
    warm = await status(client)
    report = _read_and_hash(file)
    for phase in ("fetch", "pack"):
        report[f"cold {phase}"] = _mean(before.adapters, cold.adapters, phase)
    report["from host memory: copy"] = _mean(cold.engine, warm.engine, "copy")
    report["from host memory: total"] = _mean(cold.engine, warm.engine, "total")
    return report | _bare_copy(int(report.pop("bytes")))


def _read_and_hash(file: Path) -> dict[str, float]:
    """Milliseconds, the file being in the page cache."""
    file.read_bytes()
    started = time.perf_counter()
    hashlib.sha256(file.read_bytes())
    return {"read and hash": 1e3 * (time.perf_counter() - started), "bytes": file.stat().st_size}


def _mean(before: Any, after: Any, phase: str) -> float:
    then, now = before.load_seconds[phase], after.load_seconds[phase]
    return 1e3 * (now.sum_seconds - then.sum_seconds) / max(now.count - then.count, 1)


def _bare_copy(nbytes: int) -> dict[str, float]:
    """Milliseconds of one copy from page-locked memory, by CUDA events; nothing without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return {"bare copy": statistics.median(times)}


# ---- what came of it


async def status(client: Client) -> Any:
    return await client.call(client.control.GetReplicaStatus(control_pb2.GetReplicaStatusRequest()))


def _loads(before: Any, after: Any, requests: int) -> dict[str, float]:
    """Loads to the device per request, and reloads that nothing asked for."""
    grown = after.engine.load_seconds["total"].count - before.engine.load_seconds["total"].count
    needless = after.engine.needless_reloads - before.engine.needless_reloads
    return {"loads per request": grown / requests, "needless reloads": needless}


def _summary(seen: Sequence[Seen], seconds: float) -> dict[str, float]:
    done = [s for s in seen if not s.error]
    firsts = sorted(s.first_token_seconds for s in done)
    return {
        "requests": len(seen),
        "failed": len(seen) - len(done),
        "tok/s": sum(len(s.arrivals) for s in done) / seconds,
        "first token p50 ms": 1e3 * quantile(firsts, 0.5),
        "first token p99 ms": 1e3 * quantile(firsts, 0.99),
        "first token max ms": 1e3 * quantile(firsts, 1.0),
    }


SCENARIOS = {"gaps": gaps, "working-set": working_sets, "swap": swaps, "long-swap": long_swaps}


async def measure(device: str, scenarios: Sequence[str], sizes: tuple[int, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="loraplex-churn-") as folder:
        setting = (on_gpu if device == "cuda" else on_cpu)(Path(folder))._replace(sizes=sizes)
        report = {}
        for name in scenarios:
            report[name] = await SCENARIOS[name](setting, Path(folder))
            print(name, json.dumps(report[name], indent=2), flush=True)
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="which, separated by commas")
    parser.add_argument("--sizes", default="64,256,1000", help="of working sets, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    sizes = tuple(map(int, arguments.sizes.split(",")))
    report = asyncio.run(measure(arguments.device, arguments.scenarios.split(","), sizes))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
