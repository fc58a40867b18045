"""`make bench-engine` (on a GPU): an engine in this process, with random weights of a shape, under the named loads.

Workload D: N requests at once, 128 tokens in, 256 out; time per output token. Workload T: 256 requests at once, 512 in,
128 out, 16,384 tokens a step; output tokens a second. Workload C: one more request, 128 in, arrives while 32 of the
base model decode; the worst gap between their tokens, and its first token. Adapters are random, of one rank on all
seven linears; requests take them in turn. Beside every figure its floor (`tests.bench.floors`) and how far it is off.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inference_service.adapters.layout import plan_layout
from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import EngineConfig
from inference_service.engine.cuda_runner import CudaRunner
from inference_service.engine.engine import Engine
from inference_service.engine.scheduler import Scheduler
from inference_service.lora.adapter import AdapterState
from inference_service.lora.pool import AdapterPool
from inference_service.lora.slots import SlotTable
from inference_service.types import Acquired, GenerateSpec, Sampling, Stop
from kernels.bench.timing import copy_bandwidth
from shared.adapter_format.binding import BindingPlan, ModuleBinding
from shared.base_model import MODULES, ModelConfig, parse_config
from tests.bench.floors import Floors, floors
from tests.bench.shapes import SHAPES

# vLLM 0.26 on the same GPU: (adapters, rank, requests) → ms per token of workload D, and tokens a second of workload T.
PEER_D = {
    (0, 16, 1): 4.84, (0, 16, 8): 4.98, (0, 16, 32): 5.48, (1, 16, 1): 6.61, (1, 16, 8): 6.48, (1, 16, 32): 6.99,
    (8, 16, 8): 9.13, (8, 16, 32): 9.61, (32, 16, 32): 18.97, (8, 64, 8): 12.71, (8, 64, 32): 12.18,
}  # fmt: skip
PEER_T = {(0, 16): 7040.0, (8, 16): 5170.0, (32, 16): 3830.0}
PEER_C = {False: "13 (21)", True: "11 (27)"}  # gap and first token, through its server
OUTPUT_C = 40 * 8  # of those that decode: six newcomers, one every 40 steps
FIGURES = ("ms", "tok/s", "gap ms", "first ms")
HEAD = f"{'load':4} {'adapters':>8} {'rank':>4} {'N':>3} {'floor':>8} {'ratio':>12} {'vLLM':>8}  figures"


class Bench(NamedTuple):
    """An engine and what loads it."""

    engine: Engine
    pool: AdapterPool
    vocab_size: int
    floors: Floors


def layout_of(model: ModelConfig, rank: int) -> Any:
    """A blob of one rank on every linear of every layer."""
    modules = tuple(
        ModuleBinding(layer, module, "", rank, 1.0, "", "")
        for layer in range(model.num_layers)
        for module in range(len(MODULES))
    )
    return plan_layout(BindingPlan(modules, rank, 2 * len(modules), ()), model, "bfloat16")


def build(shape: str, adapters: int, rank: int, max_tokens: int) -> Bench:
    """Load random weights and put `adapters` of `rank` into the pool's reach, named "0", "1" …"""
    model = parse_config(SHAPES[shape])
    layout = layout_of(model, rank)
    host = torch.empty(max(adapters, 1) * layout.nbytes, dtype=torch.uint8, pin_memory=True)
    blobs = host.view(torch.bfloat16).view(max(adapters, 1), -1)
    blobs[:] = blobs[0].normal_(0.0, 0.01)  # the same numbers in other places cost what others would
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        config = EngineConfig(
            model=folder, load_format="dummy", device="cuda", dtype="bfloat16", max_num_seqs=256, max_model_len=4096,
            max_batched_tokens=max_tokens, adapter_memory_bytes=max(adapters, 1) * layout.nbytes + (1 << 20),
        )  # fmt: skip
        runner = CudaRunner(config, host)
    runner.warm_up()
    asked: list[str] = []
    pool = AdapterPool(SlotTable(128, runner.arena_bytes), runner.arena, asked.append, lambda _: None, time.monotonic)
    blocks = BlockAllocator(runner.num_blocks, runner.block_size, prefix_caching=True)
    engine = Engine(runner, Scheduler(runner.limits, blocks, pool), "bench")
    bench = Bench(engine, pool, model.vocab_size, floors(model, layout.nbytes, copy_bandwidth("cuda")))
    for number in range(adapters):
        pool.load(str(number), pinned=True)
        pool.on_acquired(Acquired(str(number), number * layout.nbytes, layout))
        while pool.state(str(number)) is not AdapterState.READY:
            pool.poll()
    return bench


class Finished(NamedTuple):
    """Seconds at which every token of a load arrived, by request, and how long all of it took."""

    arrivals: dict[str, list[float]]
    seconds: float


def run(bench: Bench, requests: int, prompt: int, output: int, adapters: int, seed: int) -> Finished:
    """Submit all requests at once and step until they are done."""
    generator = torch.Generator().manual_seed(seed)
    arrivals: dict[str, list[float]] = {}
    for number in range(requests):
        ids = torch.randint(0, bench.vocab_size, (prompt,), generator=generator).tolist()
        digest = str(number % adapters) if adapters else None
        stop = Stop(output, ignore_eos=True)
        bench.engine.submit(b"bench", GenerateSpec(str(number), ids, Sampling(temperature=0.0), stop, digest))
    started = time.perf_counter()
    while bench.engine.scheduler.has_work:
        bench.pool.poll()
        for output_message in bench.engine.step(time.monotonic()).values():
            assert not output_message.failed, output_message.failed
            now = time.perf_counter() - started
            for delta in output_message.deltas:
                arrivals.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
    return Finished(arrivals, time.perf_counter() - started)


def workload_d(bench: Bench, adapters: int, rank: int, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time per output token, ms: median over requests, twice."""
    for requests in sizes:
        values = []
        for repeat in range(3):
            done = run(bench, requests, 128, 256, adapters, seed=1000 * requests + 10 * adapters + repeat)
            values.append(1e3 * statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in done.arrivals.values()))
        floor = 1e3 * bench.floors.decode(requests, 128 + 256 / 2, adapters)
        row = {"load": "D", "adapters": adapters, "rank": rank, "N": requests, "ms": values[1:]}
        peer = PEER_D.get((adapters, rank, requests))
        yield {**row, "floor": floor, "ratio": [value / floor for value in values[1:]], "peer": peer}


def workload_t(bench: Bench, adapters: int, rank: int) -> list[dict[str, Any]]:
    """Output tokens a second, twice."""
    values = []
    for repeat in range(3):
        done = run(
            bench, 256, 512, 128, adapters, seed=100 * adapters + repeat
        )  # other prompts each time, or they would be cached
        values.append(256 * 128 / done.seconds)
    most = 256 * 128 / bench.floors.load(256, 512, 128, adapters)
    row = {"load": "T", "adapters": adapters, "rank": rank, "N": 256, "tok/s": values[1:]}
    peer = PEER_T.get((adapters, rank))
    return [{**row, "floor": most, "ratio": [most / value for value in values[1:]], "peer": peer}]


def workload_c(bench: Bench, adapters: int, rank: int) -> list[dict[str, Any]]:
    """Worst gap and first token, ms, of six newcomers each time, for an adapter if there is one; twice."""
    rows: dict[str, list[list[float]]] = {"gap ms": [], "first ms": []}
    for repeat in range(3):
        for values, found in zip(rows.values(), newcomers(bench, "0" if adapters else None, repeat), strict=True):
            values.append([round(1e3 * value, 1) for value in found])
    figures = {name: values[1:] for name, values in rows.items()}
    floor = 1e3 * bench.floors.decode(33, 128 + OUTPUT_C / 2, adapters)  # of the newcomer's step, and so of a gap
    row = {"load": "C", "adapters": adapters, "rank": rank, "N": 32, **figures}
    ratio = [max(gaps) / floor for gaps in figures["gap ms"]]
    return [{**row, "floor": floor, "ratio": ratio, "peer": PEER_C[adapters > 0]}]


def newcomers(bench: Bench, digest: str | None, seed: int) -> tuple[list[float], list[float]]:
    """Seconds of the worst gap beside each newcomer, and until its first token."""
    generator, engine = torch.Generator().manual_seed(1 << 20 | seed), bench.engine

    def submit(name: str, output: int, digest: str | None) -> None:
        ids = torch.randint(0, bench.vocab_size, (128,), generator=generator).tolist()
        stop = Stop(output, ignore_eos=True)
        engine.submit(b"bench", GenerateSpec(name, ids, Sampling(temperature=0.0), stop, digest))

    for number in range(32):
        submit(str(number), OUTPUT_C, None)
    last: dict[str, float] = {}
    sent: dict[str, float] = {}
    gaps: list[float] = []
    firsts: list[float] = []
    num_steps = 0
    while engine.scheduler.has_work:
        num_steps += 1
        if num_steps % 40 == 0 and len(sent) < 6:
            name = f"new {len(sent)}"
            submit(name, 8, digest)
            sent[name] = time.perf_counter()
            gaps.append(0.0)
        bench.pool.poll()
        outputs = engine.step(time.monotonic())
        now = time.perf_counter()
        for delta in (delta for output in outputs.values() for delta in output.deltas):
            if delta.request_id in sent and delta.request_id not in last:
                firsts.append(now - sent[delta.request_id])
            elif delta.request_id in last and delta.request_id not in sent and gaps:
                gaps[-1] = max(gaps[-1], now - last[delta.request_id])
            last[delta.request_id] = now
    return gaps, firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--loads", default="CDT", help="which workloads")
    parser.add_argument("--adapters", default=32, type=int, help="adapters in the pool")
    parser.add_argument("--counts", default="0,1,8,32", help="adapters in use, one run each")
    parser.add_argument("--rank", default=16, type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    bench = build(arguments.shape, arguments.adapters, arguments.rank, 16384)
    print(f"ready after {time.perf_counter() - started:.1f} s; {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    rows: list[dict[str, Any]] = []
    counts = [int(n) for n in arguments.counts.split(",")]
    print(HEAD, flush=True)
    for count in counts:
        for row in measure(bench, arguments.loads, count, arguments.rank):
            rows.append(row)
            print(line(row), flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows))


def measure(bench: Bench, loads: str, count: int, rank: int) -> Iterator[dict[str, Any]]:
    """One row for each of `loads` and number of requests, with `count` adapters in use."""
    if "C" in loads and count <= 1:
        yield from workload_c(bench, count, rank)
    if "D" in loads:
        yield from workload_d(bench, count, rank, tuple(n for n in (1, 8, 32) if n >= count))
    if "T" in loads and count != 1:
        yield from workload_t(bench, count, rank)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    ratio, peer = ", ".join(f"{each:.2f}" for each in row["ratio"]), "–" if row["peer"] is None else row["peer"]
    figures = "; ".join(f"{name} {rounded(row[name])}" for name in FIGURES if name in row)
    place = f"{row['load']:4} {row['adapters']:8} {row['rank']:4} {row['N']:3}"
    return f"{place} {row['floor']:8.2f} {ratio:>12} {peer:>8}  {figures}"


def rounded(value: Any) -> Any:
    """For the eye: two digits, in lists of lists as well."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
