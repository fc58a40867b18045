"""How long adapters take: `python -m kernels.bench [--device cuda|cpu] [--model NAME] [--rows N …] [--json FILE]`.

One line for each group of linears, workload and number of rows: µs for shrink and expand together, and the ratio to the
byte floor. On a GPU a CUDA graph calls the door once per layer of a table too large for the cache, with inputs and
outputs of their own, so that everything comes from memory; on a CPU it is a plain loop. Decode rows, unless --prefill.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.lora import add_lora
from kernels.table import AdapterTable, Group, LoraRows
from kernels.workloads import NAMES, Workload, random_table, workload

MAX_LAYERS = 256
REPLAYS = 10


class Model(NamedTuple):
    """Sizes of a base model's linears."""

    hidden: int
    kv: int
    intermediate: int

    def groups(self) -> dict[str, Group]:
        """The four packed projections."""
        q, k, mlp = self.hidden, self.kv, self.intermediate
        return {
            "qkv": Group((0, 1, 2), (0, q, q + k, q + 2 * k), self.hidden),
            "o": Group((3,), (0, self.hidden), q),
            "gate_up": Group((4, 5), (0, mlp, 2 * mlp), self.hidden),
            "down": Group((6,), (0, self.hidden), mlp),
        }


MODELS = {"llama-3.1-8b": Model(4096, 1024, 14336), "smollm2-135m": Model(576, 192, 1536)}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
# So much is touched before anything is touched again; caches are smaller.
ROTATED_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}


class Result(NamedTuple):
    """One measured line."""

    group: str
    workload: str
    rows: int
    rank: int
    phase: str
    micros: float
    floor_micros: float


def measure(group: Group, load: Workload, device: str, num_decodes: int) -> tuple[float, int]:
    """Seconds a call, and the bytes that it must move."""
    dtype = DTYPES[device]
    nbytes = bytes_touched(group, load, dtype)
    num_layers = min(MAX_LAYERS, max(2, ROTATED_BYTES[device] // nbytes))
    table = random_table(load.ranks, [group], num_layers, dtype, device)
    xs, ys = (
        torch.randn(num_layers, len(load.row_slots), width, device=device, dtype=dtype)
        for width in (group.in_features, group.columns[-1])
    )
    on_gpu = device == "cuda"
    row_slots = torch.tensor(load.row_slots, dtype=torch.int32, device=device) if on_gpu else None
    rows = LoraRows(load.segments(), row_slots, num_decodes)
    time_layers = time_graph if on_gpu else time_loop
    seconds = time_layers(lambda: add_to_layers(ys, xs, table, group, rows))
    return seconds / num_layers, nbytes


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.zeros(ROTATED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    time_copy = time_graph if device == "cuda" else time_loop
    return 2 * source.numel() / time_copy(lambda: target.copy_(source))


def bytes_touched(group: Group, load: Workload, dtype: torch.dtype) -> int:
    """What a call must move at least: adapters used and x once, y read and written."""
    rows = [slot for slot in load.row_slots if slot >= 0]
    per_rank = len(group.modules) * group.in_features + group.columns[-1]
    adapters = sum(load.ranks[slot] for slot in set(rows)) * per_rank
    return (adapters + len(rows) * (group.in_features + 2 * group.columns[-1])) * dtype.itemsize


def add_to_layers(ys: Tensor, xs: Tensor, table: AdapterTable, group: Group, rows: LoraRows) -> None:
    """The door once per layer, each with its own x and y."""
    for layer in range(table.num_layers):
        add_lora(ys[layer], xs[layer], table, layer, group, rows)


def time_graph(call: Callable[[], object]) -> float:
    """Seconds of one `call`, replayed from a CUDA graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPLAYS / 1e3


def time_loop(call: Callable[[], object]) -> float:
    """Seconds of one `call`: the best of a few."""
    call()  # fills the table's views
    best = float("inf")
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DTYPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--workload", choices=NAMES, nargs="+", default=NAMES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prefill", action="store_true", help="rows are prompts, not one a sequence")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, and write JSON."""
    options = parse()
    phase = "prefill" if options.prefill else "decode"
    results: list[Result] = []
    bandwidth = copy_bandwidth(options.device)
    print(f"{options.device} {DTYPES[options.device]}, {phase}, copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    print(f"{'group':8} {'workload':11} {'rows':>5} {'rank':>4} {'µs':>9} {'floor':>8} {'ratio':>6}")
    for name, group in MODELS[options.model].groups().items():
        for kind in options.workload:
            for rows in options.rows:
                load = workload(kind, rows, options.rank)
                seconds, nbytes = measure(group, load, options.device, 0 if options.prefill else rows)
                micros, floor = seconds * 1e6, nbytes / bandwidth * 1e6
                results.append(Result(name, kind, rows, options.rank, phase, micros, floor))
                print(f"{name:8} {kind:11} {rows:5} {options.rank:4} {micros:9.1f} {floor:8.2f} {micros / floor:6.1f}")
    if options.json:
        options.json.write_text(json.dumps([result._asdict() for result in results], indent=1))


if __name__ == "__main__":
    main()
