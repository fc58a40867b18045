"""Shrink and expand of one packed projection: µs, beside the byte floor and a peer's kernels."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.bench.shapes import DTYPES, bytes_touched
from kernels.bench.timing import ROTATED_BYTES, time_call
from kernels.lora import add_lora, rows_per_chunk
from kernels.table import AdapterTable, Group, LoraRows
from kernels.workloads import Workload, chunks_of, random_table

MAX_LAYERS = 256
# µs that shrink and expand of (projection, workload, rows, rank) of the 8B shape may take on an H200: at most, the aim.
TARGETS = {
    ("gate_up", "distinct", 8, 16): (9.0, 5.0),
    ("qkv", "distinct", 8, 16): (8.0, 4.0),
    ("gate_up", "distinct", 32, 16): (20.0, 14.0),
    ("qkv", "distinct", 32, 16): (14.0, 8.0),
    ("gate_up", "distinct", 64, 16): (35.0, 26.0),
    ("gate_up", "16 prompts", 8192, 16): (320.0, 270.0),
}
MOST_ERROR = 0.02  # of a peer's result, of the largest number in it: both may round to bfloat16 on the way
NO_TARGET = (float("nan"), float("nan"))
MIXED_RATIO = (1.8, 1.3)  # to the floor, of "all-ranks" at 32 rows


class Peer(Protocol):
    """Another system's kernels: built once for a table and a batch, then called for each layer."""

    def __init__(self, table: AdapterTable, group: Group, load: Workload) -> None: ...

    def shrink_expand(self, y: Tensor, x: Tensor, layer: int) -> None:
        """Add the adapters' part to `y`, in place."""


class Result(NamedTuple):
    """One measured line. `target`, `aim` in µs, NaN without one."""

    group: str
    workload: str
    rows: int
    rank: int
    micros: float
    floor: float
    target: float
    aim: float
    peer: float


class OurKernels:
    """The door, as a `Peer`."""

    def __init__(self, table: AdapterTable, group: Group, load: Workload) -> None:
        self.table, self.group = table, group
        on_gpu = table.weights.is_cuda
        chunks = chunks_of(load, rows_per_chunk(len(load.row_slots)), "cuda") if on_gpu else None
        self.rows = LoraRows(load.segments(), chunks)

    def shrink_expand(self, y: Tensor, x: Tensor, layer: int) -> None:
        """See `Peer`."""
        add_lora(y, x, self.table, layer, self.group, self.rows)


def measure(
    names: tuple[str, str], group: Group, load: Workload, device: str, bandwidth: float, peer: type[Peer] | None
) -> Result:
    """A line for the projection and the workload with these names.

    Raises:
        ValueError: the peer's kernels compute something else.
    """
    dtype, rows, rank = DTYPES[device], len(load.row_slots), load.ranks[0]
    nbytes = bytes_touched(group, load, dtype)
    layers = min(MAX_LAYERS, max(2, ROTATED_BYTES[device] // nbytes))
    table = random_table(load.ranks, [group], layers, dtype, device)
    xs, ys = (
        torch.randn(layers, rows, width, device=device, dtype=dtype) for width in (group.in_features, group.columns[-1])
    )
    kinds: list[type[Peer]] = [OurKernels] if peer is None else [OurKernels, peer]
    kernels = [kind(table, group, load) for kind in kinds]
    for each in kernels[1:]:
        _check(each, kernels[0], xs[0], ys[0])
    micros = [_time_layers(each, xs, ys, device) / layers * 1e6 for each in kernels]
    floor = nbytes / bandwidth * 1e6
    target, aim = TARGETS.get((*names, rows, rank), NO_TARGET) if device == "cuda" else NO_TARGET
    if names[1] == "all-ranks" and rows == 32:
        target, aim = MIXED_RATIO[0] * floor, MIXED_RATIO[1] * floor
    return Result(*names, rows, rank, micros[0], floor, target, aim, micros[1] if peer else float("nan"))


def _check(peer: Peer, ours: Peer, x: Tensor, y: Tensor) -> None:
    """Time means nothing where the result is wrong. Ours is compared with float64 by the tests."""
    found, expected = y.clone(), y.clone()
    peer.shrink_expand(found, x, 0)
    ours.shrink_expand(expected, x, 0)
    error, most = (found - expected).abs().max().item(), MOST_ERROR * expected.abs().max().item()
    if not error <= most:
        raise ValueError(f"{type(peer).__name__} is wrong by {error:.3g}, which is more than rounding ({most:.3g})")


def _time_layers(kernels: Peer, xs: Tensor, ys: Tensor, device: str) -> float:
    """Seconds of one call after the other for all layers, each with its own x and y."""

    def run() -> None:
        for layer in range(xs.shape[0]):
            kernels.shrink_expand(ys[layer], xs[layer], layer)

    return time_call(run, device)
