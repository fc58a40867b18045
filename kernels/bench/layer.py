"""What adapters add to a decoder layer's step on a GPU: base products and the ops after them, with and without LoRA.

As in serving: what adapters add is computed beside the base product (`kernels.beside`), and added by the next op.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.bench.shapes import Model, bytes_touched
from kernels.bench.timing import time_graph
from kernels.beside import Sides, product_and_delta
from kernels.lora import rows_per_chunk
from kernels.rms_norm import add_rms_norm
from kernels.rotary import rotary_kv_write, rotary_table
from kernels.silu_mul import silu_mul
from kernels.table import MAX_RANK, AdapterTable, Group
from kernels.workloads import Workload, chunks_of, random_table

LAYERS = 12
DTYPE, DEVICE, BLOCK_SIZE = torch.bfloat16, "cuda", 16
# µs that adapters may add to (projection, rows) with an adapter of rank 16 for each row: at most, and the aim.
TARGETS = {("qkv", 8): (3.0, 1.5), ("gate_up", 8): (4.5, 3.0)}


class Added(NamedTuple):
    """One measured line, µs."""

    group: str
    workload: str
    rows: int
    base: float
    added: float
    floor: float
    target: float
    aim: float


class Projection:
    """One projection of every layer, with adapters, and the op after it."""

    def __init__(self, model: Model, name: str, load: Workload) -> None:
        self.group: Group = model.groups()[name]
        rows, width = len(load.row_slots), self.group.columns[-1]
        table = random_table(load.ranks, [self.group], LAYERS, DTYPE, DEVICE)
        self.table = AdapterTable(table.weights, table.entries, MAX_RANK)
        self.weights = _normal(LAYERS, width, self.group.in_features) / 64
        self.xs = _normal(LAYERS, rows, self.group.in_features)
        self.chunks = chunks_of(load, rows_per_chunk(rows), DEVICE)._replace(max_rank=MAX_RANK)
        self.sides = Sides(torch.cuda.Stream(), torch.cuda.Stream())
        self.next_op = _next_op(model, name, rows)

    def run(self, layer: int, lora: bool) -> None:
        """The base product, with what adapters add, and the next op."""
        x, weight = self.xs[layer], self.weights[layer]
        if not lora:
            self.next_op(x @ weight.t(), None)
            return
        y, delta = product_and_delta(
            lambda x: x @ weight.t(), x, self.table, layer, self.group, self.chunks, self.sides
        )
        self.next_op(y, delta)


def _next_op(model: Model, name: str, rows: int) -> Callable[[Tensor, Tensor | None], object]:
    if name == "gate_up":
        return lambda y, delta: silu_mul(y, delta)
    if name != "qkv":
        residual, weight = _normal(rows, model.hidden), _normal(model.hidden)
        return lambda y, delta: add_rms_norm(y, residual, weight, 1e-5, delta)
    table = rotary_table(torch.rand(model.head_dim // 2, device=DEVICE), 8192)
    slots = torch.arange(rows, device=DEVICE)
    caches = _normal(2, -(-rows // BLOCK_SIZE), BLOCK_SIZE, model.kv_heads, model.head_dim)
    return lambda y, delta: rotary_kv_write(y, table, slots, slots, caches[0], caches[1], delta=delta)


def measure(model: Model, names: Sequence[str], kind: str, load: Workload, bandwidth: float) -> Added:
    """A line for the projections `names`, one after the other."""
    projections = [Projection(model, name, load) for name in names]

    def run(lora: bool) -> None:
        for layer in range(LAYERS):
            for projection in projections:
                projection.run(layer, lora)

    base, full = (time_graph(partial(run, lora)) / LAYERS * 1e6 for lora in (False, True))
    # The base product and the next op read x and y in either case.
    nbytes = sum(_adapter_bytes(each.group, load) for each in projections)
    label = names[0] if len(names) == 1 else "layer"
    rows = len(load.row_slots)
    target, aim = TARGETS.get((label, rows), (float("nan"),) * 2) if kind == "distinct" else (float("nan"),) * 2
    return Added(label, kind, rows, base, full - base, nbytes / bandwidth * 1e6, target, aim)


def _adapter_bytes(group: Group, load: Workload) -> int:
    rows = len(load.row_slots)
    return bytes_touched(group, load, DTYPE) - rows * (group.in_features + 2 * group.columns[-1]) * DTYPE.itemsize


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)
