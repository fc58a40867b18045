"""How long the ops beside LoRA take: `python -m kernels.bench.ops [OP …] [--rows N …] [--context N] [--json FILE]`.

One line for each op and number of rows: µs of one call, and the ratio to the byte floor (what must be read and written
once, at copy bandwidth). On a GPU a CUDA graph replays calls whose inputs take turns, so that they come from memory; on
a CPU the references run in a loop. For prefill, rows are tokens of one prompt, and the floor is of its products.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.affine import apply_affine
from kernels.bench.shapes import DTYPES, MODELS, Model
from kernels.bench.timing import ROTATED_BYTES, copy_bandwidth, time_call
from kernels.lora import rows_per_chunk
from kernels.paged_attention import paged_decode, paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary_kv_write, rotary_table
from kernels.sampling import Adjustments, SamplingRows, adjust, sample, token_logprobs
from kernels.silu_mul import silu_mul
from kernels.table import NUM_MODULES, OFFSET_UNIT, AdapterTable
from kernels.workloads import chunks_of, workload

BLOCK_SIZE, MAX_POSITION = 16, 8192
NUM_TOP, NUM_BIASES = 20, 300
MAX_ROTATION = 64
FLOPS = 790e12  # of large bfloat16 products on an H200
ROWS, PREFILL_ROWS = (1, 8, 32, 256), (128, 512, 2048, 8192)


class Inputs(NamedTuple):
    """What the calls of one line are made of. `context`: tokens of each sequence in decode."""

    model: Model
    device: str
    rows: int
    context: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.device]

    def normal(self, *shape: int) -> Tensor:
        """Random numbers in the model's dtype."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def logits(self) -> Tensor:
        """`[rows, vocab]` float32, as far apart as a model's."""
        return 4 * torch.randn(self.rows, self.model.vocab, device=self.device)

    def column(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[rows]`, all the same."""
        return torch.full((self.rows,), value, dtype=dtype, device=self.device)

    def paged(self, seqs: int, context: int) -> tuple[Tensor, Tensor]:
        """Caches `[2, blocks, …]` and the block tables of `seqs` sequences, whose blocks lie in any order."""
        blocks = -(-context // BLOCK_SIZE)
        tables = torch.randperm(seqs * blocks, device=self.device).to(torch.int32).view(seqs, blocks)
        return self.normal(2, seqs * blocks, BLOCK_SIZE, self.model.kv_heads, self.model.head_dim), tables


class Work(NamedTuple):
    """One call, made anew on inputs of its own each time `build` is called, and what it must at least do."""

    build: Callable[[], Callable[[], object]]
    nbytes: int
    flops: int = 0


class Result(NamedTuple):
    """One measured line, µs."""

    op: str
    rows: int
    micros: float
    floor: float
    ratio: float


def rms_norm_work(inputs: Inputs) -> Work:
    """The first norm."""

    def build() -> Callable[[], object]:
        x, weight = inputs.normal(inputs.rows, inputs.model.hidden), inputs.normal(inputs.model.hidden)
        return lambda: rms_norm(x, weight, 1e-5)

    return Work(build, (2 * inputs.rows + 1) * inputs.model.hidden * inputs.dtype.itemsize)


def add_rms_norm_work(inputs: Inputs) -> Work:
    """Residual addition and norm of the hidden states."""
    rows, hidden = inputs.rows, inputs.model.hidden

    def build() -> Callable[[], object]:
        x, residual, weight = inputs.normal(rows, hidden), inputs.normal(rows, hidden), inputs.normal(hidden)
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    return Work(build, (4 * rows + 1) * hidden * inputs.dtype.itemsize)


def silu_mul_work(inputs: Inputs) -> Work:
    """Activation of the packed gate and up."""

    def build() -> Callable[[], object]:
        gate_up = inputs.normal(inputs.rows, 2 * inputs.model.intermediate)
        return lambda: silu_mul(gate_up)

    return Work(build, 3 * inputs.rows * inputs.model.intermediate * inputs.dtype.itemsize)


def rotary_kv_write_work(inputs: Inputs) -> Work:
    """Rotation of q and k, and the KV write."""
    rows, model = inputs.rows, inputs.model
    width = model.hidden + 2 * model.kv
    table = rotary_table(torch.rand(model.head_dim // 2, device=inputs.device), MAX_POSITION)

    def build() -> Callable[[], object]:
        qkv, slots = inputs.normal(rows, width), torch.randperm(rows, device=inputs.device)
        caches, positions = inputs.paged(1, rows)[0], slots % MAX_POSITION
        return lambda: rotary_kv_write(qkv, table, positions, slots, caches[0], caches[1])

    return Work(build, rows * (2 * width * inputs.dtype.itemsize + 4 * model.head_dim))


def paged_decode_work(inputs: Inputs) -> Work:
    """One query for each of `rows` sequences of `context` tokens."""
    rows, context, model = inputs.rows, inputs.context, inputs.model
    scale = model.head_dim**-0.5

    def build() -> Callable[[], object]:
        q, (caches, tables) = inputs.normal(rows, model.heads, model.head_dim), inputs.paged(rows, context)
        lens = inputs.column(context, torch.int32)
        return lambda: paged_decode(q, caches[0], caches[1], tables, lens, max_len=context, scale=scale)

    return Work(build, 2 * rows * (model.hidden + model.kv * context) * inputs.dtype.itemsize)


def paged_prefill_work(inputs: Inputs) -> Work:
    """One prompt of `rows` tokens."""
    rows, model = inputs.rows, inputs.model
    scale = model.head_dim**-0.5

    def build() -> Callable[[], object]:
        q, (caches, tables) = inputs.normal(rows, model.heads, model.head_dim), inputs.paged(1, rows)
        starts = torch.tensor([0, rows], dtype=torch.int32, device=inputs.device)
        return lambda: paged_prefill(q, caches[0], caches[1], tables, starts, starts[1:], scale=scale)

    nbytes = 2 * rows * (model.hidden + model.kv) * inputs.dtype.itemsize
    return Work(build, nbytes, flops=2 * model.hidden * rows * (rows + 1))


def affine_work(inputs: Inputs) -> Work:
    """Gains and offsets of the packed gate and up, each row's its own (`workloads`: distinct), and what A and B add."""
    rows, group, load = inputs.rows, inputs.model.groups()["gate_up"], workload("distinct", inputs.rows)
    width, slots = group.columns[-1], len(load.ranks)
    starts = torch.arange(2 * slots, dtype=torch.int32).view(slots, 1, 2) * width  # of gain and offset, in elements
    columns = torch.tensor(group.columns[:-1], dtype=torch.int32)[:, None]
    affines = torch.full((slots, 1, NUM_MODULES, 2), -1, dtype=torch.int32)
    affines[:, 0, list(group.modules)] = (starts + columns) * 4 // OFFSET_UNIT
    entries = torch.zeros((slots, 1, NUM_MODULES, 4), dtype=torch.int32, device=inputs.device)

    def build() -> Callable[[], object]:
        vectors = torch.randn(2 * slots * width, device=inputs.device).view(inputs.dtype)
        table = AdapterTable(vectors, entries, affines=affines.to(inputs.device))
        chunks = chunks_of(load, rows_per_chunk(rows), inputs.device)
        y, delta = inputs.normal(rows, width), torch.randn(rows, width, device=inputs.device)
        return lambda: apply_affine(y, delta, table, 0, group, chunks)

    return Work(build, rows * width * 2 * (inputs.dtype.itemsize + 4) + 2 * slots * width * 4)


def adjust_work(inputs: Inputs) -> Work:
    """Penalties over the counts of all tokens, and biases."""
    rows, vocab = inputs.rows, inputs.model.vocab

    def build() -> Callable[[], object]:
        logits = inputs.logits().to(inputs.dtype)
        own = torch.arange(rows, dtype=torch.int32, device=inputs.device)
        counts = torch.randint(0, 2, (rows, vocab), dtype=torch.int32, device=inputs.device)
        biased = torch.randperm(vocab, device=inputs.device)[:NUM_BIASES].to(torch.int32).repeat(rows, 1)
        penalties = inputs.column(1.1), inputs.column(0.1), inputs.column(0.1)
        how = Adjustments(*penalties, own, counts, own, biased, torch.ones_like(biased, dtype=torch.float32))
        return lambda: adjust(logits, how)

    return Work(build, rows * vocab * (inputs.dtype.itemsize + 4 + 4) + rows * NUM_BIASES * 4 * 4)


def sample_work(inputs: Inputs, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Work:
    """A token for each row of float32 logits."""

    def build() -> Callable[[], object]:
        logits = inputs.logits()
        filters = inputs.column(0.8), inputs.column(top_k, torch.int32), inputs.column(top_p), inputs.column(min_p)
        how = SamplingRows(*filters, *(inputs.column(value, torch.int64) for value in (1, 2, 3)))
        return lambda: sample(logits, how, filtered=top_k > 0 or top_p < 1 or min_p > 0)

    return Work(build, 4 * inputs.rows * inputs.model.vocab)


def sample_top_p_work(inputs: Inputs) -> Work:
    """Sampling with top-p 0.9."""
    return sample_work(inputs, top_p=0.9)


def sample_top_k_work(inputs: Inputs) -> Work:
    """Sampling with top-k 50 and top-p 0.9."""
    return sample_work(inputs, top_k=50, top_p=0.9)


def sample_min_p_work(inputs: Inputs) -> Work:
    """Sampling with min-p 0.05."""
    return sample_work(inputs, min_p=0.05)


def token_logprobs_work(inputs: Inputs) -> Work:
    """Logprobs of the chosen token and of the best ones."""

    def build() -> Callable[[], object]:
        logits, ids = inputs.logits().to(inputs.dtype), inputs.column(3, torch.int64)
        return lambda: token_logprobs(logits, ids, NUM_TOP)

    return Work(build, inputs.rows * inputs.model.vocab * inputs.dtype.itemsize)


OPS: dict[str, Callable[[Inputs], Work]] = {
    "rms_norm": rms_norm_work,
    "add_rms_norm": add_rms_norm_work,
    "silu_mul": silu_mul_work,
    "rotary_kv_write": rotary_kv_write_work,
    "paged_decode": paged_decode_work,
    "paged_prefill": paged_prefill_work,
    "affine": affine_work,
    "adjust": adjust_work,
    "sample": sample_work,
    "sample_top_p": sample_top_p_work,
    "sample_top_k": sample_top_k_work,
    "sample_min_p": sample_min_p_work,
    "token_logprobs": token_logprobs_work,
}


def measure(work: Work, device: str) -> float:
    """Seconds a call."""
    rotation = max(2, min(MAX_ROTATION, ROTATED_BYTES[device] // work.nbytes))
    calls = [work.build() for _ in range(rotation)]
    return time_call(lambda: [call() for call in calls], device) / rotation


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.ops", description=__doc__.splitlines()[0])
    parser.add_argument("ops", metavar="OP", nargs="*", default=list(OPS), help=", ".join(OPS))
    parser.add_argument("--device", choices=DTYPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", help="default: 1 8 32 256, for prefill 128 512 2048 8192")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence in decode")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON."""
    options = parse(arguments)
    device, bandwidth = options.device, copy_bandwidth(options.device)
    results: list[dict[str, object]] = []
    print(f"{device} {DTYPES[device]}, copy bandwidth {bandwidth / 1e9:.0f} GB/s, context {options.context}")
    print(f"{'op':16} {'rows':>5} {'µs':>9} {'floor':>8} {'ratio':>6}")
    for name in options.ops:
        for rows in options.rows or (PREFILL_ROWS if name == "paged_prefill" else ROWS):
            work = OPS[name](Inputs(MODELS[options.model], device, rows, options.context))
            micros = measure(work, device) * 1e6
            floor = max(work.nbytes / bandwidth, work.flops / FLOPS) * 1e6
            results.append(Result(name, rows, micros, floor, micros / floor)._asdict())
            print(f"{name:16} {rows:5} {micros:9.2f} {floor:8.2f} {micros / floor:6.1f}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"copy_bandwidth": bandwidth, "ops": results}, indent=1))


if __name__ == "__main__":
    main()
