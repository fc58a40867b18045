"""How long the ops beside LoRA take: `python -m kernels.bench.ops [OP …] [--rows N …] [--context N]`.

Shapes of Llama-3.1-8B in bfloat16, on a GPU. One line for each op and number of rows: µs of one call replayed from a
CUDA graph, which takes inputs in turn so that they come from memory, and the ratio to the byte floor (what must be read
and written once, at copy bandwidth). For prefill, rows are tokens of one prompt, and the floor is of its products.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.bench.timing import ROTATED_BYTES, copy_bandwidth, time_graph
from kernels.paged_attention import paged_decode, paged_prefill
from kernels.rms_norm import add_rms_norm
from kernels.rotary import rotary_kv_write, rotary_table
from kernels.sampling import SamplingRows, sample
from kernels.silu_mul import silu_mul

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 128256, 16
DTYPE, DEVICE = torch.bfloat16, "cuda"
MAX_ROTATION = 64
FLOPS = 790e12  # of large bfloat16 products on an H200


class Work(NamedTuple):
    """One call, made anew on inputs of its own each time `build` is called, and what it must at least do."""

    build: Callable[[], Callable[[], object]]
    nbytes: int
    flops: int = 0


def add_rms_norm_work(rows: int, context: int) -> Work:
    """Residual addition and norm of the hidden states."""

    def build() -> Callable[[], object]:
        x, residual, weight = _normal(rows, HIDDEN), _normal(rows, HIDDEN), _normal(HIDDEN)
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    return Work(build, 2 * (4 * rows + 1) * HIDDEN)


def silu_mul_work(rows: int, context: int) -> Work:
    """Activation of the packed gate and up."""

    def build() -> Callable[[], object]:
        gate_up = _normal(rows, 2 * INTERMEDIATE)
        return lambda: silu_mul(gate_up)

    return Work(build, 2 * 3 * rows * INTERMEDIATE)


def rotary_kv_write_work(rows: int, context: int) -> Work:
    """Rotation of q and k, and the KV write."""
    table = rotary_table(torch.rand(HEAD_DIM // 2, device=DEVICE), 8192)

    def build() -> Callable[[], object]:
        qkv = _normal(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        slots = torch.randperm(rows, device=DEVICE)
        caches = _normal(2, -(-rows // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        positions = slots % 8192
        return lambda: rotary_kv_write(qkv, table, positions, slots, caches[0], caches[1])

    return Work(build, 2 * 2 * rows * (HEADS + 2 * KV_HEADS) * HEAD_DIM + 4 * rows * HEAD_DIM)


def paged_decode_work(rows: int, context: int) -> Work:
    """One query for each of `rows` sequences of `context` tokens."""

    def build() -> Callable[[], object]:
        q, caches, tables = _normal(rows, HEADS, HEAD_DIM), *_paged(rows, context)
        lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        return lambda: paged_decode(q, caches[0], caches[1], tables, lens, max_len=context, scale=HEAD_DIM**-0.5)

    return Work(build, 2 * rows * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS * context))


def paged_prefill_work(rows: int, context: int) -> Work:
    """One prompt of `rows` tokens."""

    def build() -> Callable[[], object]:
        q, caches, tables = _normal(rows, HEADS, HEAD_DIM), *_paged(1, rows)
        starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
        return lambda: paged_prefill(q, caches[0], caches[1], tables, starts, starts[1:], scale=HEAD_DIM**-0.5)

    nbytes = 2 * rows * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    return Work(build, nbytes, flops=4 * HEADS * HEAD_DIM * rows * (rows + 1) // 2)


def sample_work(rows: int, context: int, *, top_k: int = 0, top_p: float = 1.0) -> Work:
    """A token for each row of float32 logits."""

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=DEVICE)

    def build() -> Callable[[], object]:
        logits = 4 * torch.randn(rows, VOCAB, device=DEVICE)
        floats = [column(value, torch.float32) for value in (0.8, top_p, 0.0)]
        integers = [column(value, torch.int64) for value in (1, 2, 3)]
        how = SamplingRows(floats[0], column(top_k, torch.int32), *floats[1:], *integers)
        return lambda: sample(logits, how, filtered=top_k > 0 or top_p < 1)

    return Work(build, 4 * rows * VOCAB)


def sample_top_p_work(rows: int, context: int) -> Work:
    """Sampling with top-p 0.9."""
    return sample_work(rows, context, top_p=0.9)


def sample_top_k_work(rows: int, context: int) -> Work:
    """Sampling with top-k 50 and top-p 0.9."""
    return sample_work(rows, context, top_k=50, top_p=0.9)


OPS: dict[str, Callable[[int, int], Work]] = {
    "add_rms_norm": add_rms_norm_work,
    "silu_mul": silu_mul_work,
    "rotary_kv_write": rotary_kv_write_work,
    "paged_decode": paged_decode_work,
    "paged_prefill": paged_prefill_work,
    "sample": sample_work,
    "sample_top_p": sample_top_p_work,
    "sample_top_k": sample_top_k_work,
}


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _paged(seqs: int, context: int) -> tuple[Tensor, Tensor]:
    """Caches `[2, blocks, …]` and the block tables of `seqs` sequences, whose blocks lie in any order."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(seqs * blocks, device=DEVICE).to(torch.int32).view(seqs, blocks)
    return _normal(2, seqs * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM), tables


def measure(work: Work) -> float:
    """Seconds a call."""
    rotation = max(2, min(MAX_ROTATION, ROTATED_BYTES[DEVICE] // work.nbytes))
    calls = [work.build() for _ in range(rotation)]
    return time_graph(lambda: [call() for call in calls]) / rotation


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.ops", description=__doc__.splitlines()[0])
    parser.add_argument("ops", metavar="OP", nargs="*", default=list(OPS), help=", ".join(OPS))
    parser.add_argument("--rows", type=int, nargs="+", help="default: 1 8 32 256, for prefill 128 512 2048 8192")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence in decode")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    bandwidth = copy_bandwidth(DEVICE)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s, context {options.context}")
    print(f"{'op':16} {'rows':>5} {'µs':>9} {'floor':>8} {'ratio':>6}")
    for name in options.ops:
        for rows in options.rows or ([128, 512, 2048, 8192] if name == "paged_prefill" else [1, 8, 32, 256]):
            work = OPS[name](rows, options.context)
            micros = measure(work) * 1e6
            floor = max(work.nbytes / bandwidth, work.flops / FLOPS) * 1e6
            print(f"{name:16} {rows:5} {micros:9.2f} {floor:8.2f} {micros / floor:6.1f}", flush=True)


if __name__ == "__main__":
    main()
