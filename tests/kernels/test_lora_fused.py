"""The ops that take an expand along: against the ops one after the other, and against float64."""

import pytest
import torch
from torch import Tensor

from kernels import lora
from kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from kernels.rotary import HeadNorm, rotary_kv_write, rotary_kv_write_reference, rotary_table
from kernels.silu_mul import silu_mul, silu_mul_reference
from kernels.table import RANK, Addend, Chunks, Group
from kernels.workloads import Workload, chunks_of, random_table, workload
from tests.kernels.poisoning import DEVICE, DTYPES, assert_close, assert_no_worse, poison_empty, poisoned, random

triton = pytest.importorskip("triton")
from kernels import (  # noqa: E402  the interpreter is chosen by conftest
    bgmv,
    rms_norm_triton,
    rotary_lora_triton,
    rotary_triton,
    sgmv,
    silu_mul_lora_triton,
    silu_mul_triton,
)

ON_GPU = DEVICE == "cuda"
SIZES = [1, 16]  # rows of a chunk
LOADS = [workload("mixed-rank", 7), workload("identical", 3), workload("skewed", 33 if ON_GPU else 5)]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    rotaries, activations = (rotary_lora_triton, rotary_triton), (silu_mul_lora_triton, silu_mul_triton)
    poison_empty(monkeypatch, [bgmv, sgmv, rms_norm_triton, *rotaries, *activations])


class Case:
    """A projection's base output, and the addend that its adapters make."""

    def __init__(self, load: Workload, group: Group, dtype: torch.dtype, rows_per_chunk: int) -> None:
        self.group, self.rows = group, len(load.row_slots)
        self.table = random_table(load.ranks, [group], 2, dtype, DEVICE)
        self.table.entries[0, 1, group.modules[-1], RANK] = 0  # an unadapted module
        self.y = random(self.rows, group.columns[-1], dtype=dtype)
        x = random(self.rows, group.in_features, dtype=dtype, seed=1)
        self.chunks = chunks_of(load, rows_per_chunk, DEVICE)
        v = lora.shrink(x, self.table, 1, group, self.chunks)
        self.addend = Addend(v, self.table, 1, group, self.chunks)
        self.wide = self.y.double()
        for slot, start, end in load.segments():
            for part in self.table.parts(slot, 1, group):
                shrunk = x[start:end].double() @ part.a.double()
                for each in part.expands:
                    delta = shrunk[:, each.first : each.last] @ each.b.double()
                    self.wide[start:end, each.begin : each.end] += each.scale * delta

    def added(self) -> Tensor:
        y = self.y.clone()
        lora.add(y, self.addend)
        return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS, ids=["mixed", "identical", "skewed"])
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(size: int, load: Workload, dtype: torch.dtype) -> None:
    case = Case(load, Group((4, 5), (0, 264, 528), 64), dtype, size)
    expected, plain = silu_mul_reference(case.wide), silu_mul_reference(case.added())
    actual = silu_mul(case.y.clone(), case.addend)
    assert_close(actual, expected)
    assert_no_worse(actual, plain, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS, ids=["mixed", "identical", "skewed"])
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size: int, load: Workload, dtype: torch.dtype) -> None:
    case = Case(load, Group((6,), (0, 264), 1040), dtype, size)
    weight, before = random(264, dtype=dtype, seed=2), random(case.rows, 264, dtype=dtype, seed=3)
    residual, other, wide = before.clone(), before.clone(), before.double()
    out = poisoned(case.rows, 264, dtype=dtype)
    assert add_rms_norm(case.y.clone(), residual, weight, EPS, case.addend, out) is out
    plain = add_rms_norm_reference(case.added(), other, weight, EPS)
    assert_close(residual, other.double())
    expected = add_rms_norm_reference(case.wide, wide, weight.double(), EPS)
    assert_close(residual, wide)
    assert_close(out, expected)
    assert_no_worse(out, plain, expected)


SHAPES = [(9, 3, 64), (14, 2, 80)] if ON_GPU else [(3, 1, 24), (4, 2, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "norm"), [(SHAPES[0], False), (SHAPES[1], True)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rotary_kv_write(size: int, shape: tuple[int, int, int], dtype: torch.dtype, norm: bool) -> None:
    heads, kv_heads, head_dim = shape
    q, k = heads * head_dim, kv_heads * head_dim
    case = Case(LOADS[0], Group((0, 1, 2), (0, q, q + k, q + 2 * k), 48), dtype, size)
    table = rotary_table(1e4 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim), 70)
    positions, slots = torch.arange(7, device=DEVICE) * 9, torch.arange(7, device=DEVICE) * 4 - 1
    weights = [random(head_dim, dtype=dtype, seed=seed) for seed in (4, 5)]

    def run(op: object, qkv: Tensor, **more: object) -> tuple[Tensor, Tensor, Tensor]:
        caches = [poisoned(2, 16, kv_heads, head_dim, dtype=qkv.dtype) for _ in range(2)]
        head_norm = HeadNorm(*(weight.to(qkv.dtype) for weight in weights), 1e-6) if norm else None
        return op(qkv, table, positions, slots, *caches, head_norm, **more), *caches

    actual = run(rotary_kv_write, case.y.clone(), addend=case.addend)
    plain = run(rotary_kv_write_reference, case.added())
    expected = run(rotary_kv_write_reference, case.wide)
    for got, reference_, truth in zip(actual, plain, expected, strict=True):
        written = ~truth.isnan()
        assert torch.equal(~got.isnan(), written)
        # A norm divides by the size of what is normed, and the error that was there with it.
        assert_close(got[written], reference_[written].double())
        assert_no_worse(got[written], reference_[written], truth[written])
    kept = slots[slots >= 0]
    assert_close(actual[2].flatten(0, 1)[kept].flatten(1), case.added()[slots >= 0, q + k :].double())


@pytest.mark.parametrize("size", SIZES)
def test_surplus_chunks_do_nothing(size: int) -> None:
    case = Case(LOADS[0], Group((4, 5), (0, 264, 528), 64), torch.float32, size)
    surplus = torch.tensor([[-1, 0, 0, 0]] * 3, dtype=torch.int32, device=DEVICE)
    longer = case.addend._replace(chunks=Chunks(torch.cat((case.chunks.list, surplus)), size))
    assert torch.equal(silu_mul(case.y.clone(), longer), silu_mul(case.y.clone(), case.addend))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
def test_a_graph_with_the_shrink_on_another_stream_equals_eager() -> None:
    """Overlapping launches wait for both what comes before them and what runs beside it."""
    load = workload("distinct", 32)
    case = Case(load, Group((4, 5), (0, 14336, 28672), 4096), torch.bfloat16, 1)
    x, weight = random(32, 4096, dtype=torch.bfloat16), random(28672, 4096, dtype=torch.bfloat16, seed=1) / 64
    side = torch.cuda.Stream()

    def step() -> Tensor:
        main = torch.cuda.current_stream()
        before = main.record_event()
        y = x @ weight.t()
        side.wait_event(before)
        with torch.cuda.stream(side):
            v = lora.shrink(x, case.table, 1, case.group, case.chunks)
        main.wait_stream(side)
        return silu_mul(y, case.addend._replace(v=v))

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step() for _ in range(8)]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
