"""How long adapters take: `python -m kernels.bench [--quick] [--json FILE] [--peer MODULE:CLASS] …`.

`linears`: one line for each projection, workload and number of rows, µs for shrink and expand together, the byte floor
(adapters used and x once, y read and written, at copy bandwidth), and what is to be reached. On a GPU a CUDA graph
takes one layer after the other of a table too large for the cache, so that everything comes from memory; on a CPU it
is a plain loop. `layer` (GPU): what adapters add to base products and the ops after them. `--peer` puts another
system's kernels beside: a class as `kernels.bench.linears.Peer` describes, in a module on the path.
The other ops: `python -m kernels.bench.ops`.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

from kernels.bench import layer, linears
from kernels.bench.shapes import DTYPES, MODELS, Model
from kernels.bench.timing import copy_bandwidth
from kernels.workloads import NAMES, Workload, prompts, workload

ROWS, QUICK_ROWS = (1, 8, 32, 64, 256), (1, 8, 32, 64)
PROMPTS = ((2048, 4), (8192, 16))
RANKS, QUICK_RANKS = (16, 64), (16,)
PROJECTIONS = ("qkv", "o", "gate_up", "down")


def linear_loads(options: argparse.Namespace) -> Iterator[tuple[str, Workload]]:
    """(name, workload) of every line of `linears` for one projection."""
    for rank in options.rank or (QUICK_RANKS if options.quick else RANKS):
        for rows in options.rows or (QUICK_ROWS if options.quick else ROWS):
            for name in options.workload or (("distinct", "identical") if options.quick else NAMES[:-1]):
                yield name, workload(name, rows, rank)
        if options.device == "cuda" and not options.rows:
            for rows, adapters in PROMPTS[-1:] if options.quick else PROMPTS:
                yield f"{adapters} prompts", prompts(rows, adapters, rank)
    if not options.rows and not options.workload:
        yield "all-ranks", workload("all-ranks", 32)


def bench_linears(options: argparse.Namespace, model: Model, bandwidth: float) -> list[dict[str, object]]:
    """Print and return the lines of `linears`."""
    results: list[dict[str, object]] = []
    print(f"{'linear':8} {'workload':11} {'rows':>5} {'rank':>4} {'µs':>8} {'floor':>7} {'ratio':>6}", end="")
    print(f" {'target':>7} {'aim':>6} {'peer':>8}")
    for name, group in model.groups().items():
        for kind, load in linear_loads(options):
            each = linears.measure((name, kind), group, load, options.device, bandwidth, options.peer)
            results.append(each._asdict())
            print(
                f"{name:8} {kind:11} {each.rows:5} {each.rank:4} {each.micros:8.1f} {each.floor:7.2f}"
                f" {each.micros / each.floor:6.1f} {each.target:7.1f} {each.aim:6.1f} {each.peer:8.1f}",
                flush=True,
            )
    return results


def bench_layer(options: argparse.Namespace, model: Model, bandwidth: float) -> list[dict[str, object]]:
    """Print and return the lines of `layer`."""
    results: list[dict[str, object]] = []
    print(
        f"{'added to':8} {'workload':11} {'rows':>5} {'base µs':>8} {'added':>6} {'floor':>6} {'ratio':>6}"
        f" {'target':>7} {'aim':>6}"
    )
    for names in (("qkv",), ("gate_up",), PROJECTIONS):
        for rows in options.rows or (1, 8, 32):
            for kind in ("distinct",) if rows == 1 or options.quick else ("distinct", "identical"):
                each = layer.measure(model, names, kind, workload(kind, rows), bandwidth)
                results.append(each._asdict())
                print(
                    f"{each.group:8} {kind:11} {rows:5} {each.base:8.1f} {each.added:6.1f} {each.floor:6.2f}"
                    f" {each.added / each.floor:6.1f} {each.target:7.1f} {each.aim:6.1f}",
                    flush=True,
                )
    return results


def peer_class(text: str) -> type[linears.Peer]:
    """The class that MODULE:CLASS names."""
    module, _, name = text.partition(":")
    found: type[linears.Peer] = getattr(import_module(module), name)
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DTYPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--part", choices=("linears", "layer"), nargs="+", default=["linears", "layer"])
    parser.add_argument("--workload", choices=NAMES, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--rank", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true", help="fewer workloads, rows and ranks")
    parser.add_argument("--peer", type=peer_class, metavar="MODULE:CLASS")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON."""
    options = parse(arguments)
    model, bandwidth = MODELS[options.model], copy_bandwidth(options.device)
    print(f"{options.device} {DTYPES[options.device]}, copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    results: dict[str, object] = {"copy_bandwidth": bandwidth}
    if "linears" in options.part:
        results["linears"] = bench_linears(options, model, bandwidth)
    if "layer" in options.part and options.device == "cuda":
        results["layer"] = bench_layer(options, model, bandwidth)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
