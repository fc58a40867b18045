"""What adapters add beside a base product, and the ops that add it, against float64."""

import pytest
import torch
from torch import Tensor

from kernels import lora
from kernels.reference import rounded_sum
from kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from kernels.rotary import HeadNorm, rotary_kv_write, rotary_kv_write_reference, rotary_table
from kernels.silu_mul import silu_mul, silu_mul_reference
from kernels.table import RANK, Group
from kernels.workloads import Workload, chunks_of, random_table, workload
from tests.kernels.poisoning import (
    DEVICE,
    DTYPES,
    FEWER_DTYPES,
    assert_close,
    assert_no_worse,
    poison_empty,
    poisoned,
    random,
)

triton = pytest.importorskip("triton")
from kernels import (  # noqa: E402  the interpreter is chosen by conftest
    beside,
    bgmv,
    rms_norm_triton,
    rotary_triton,
    sgmv,
    silu_mul_triton,
    tall,
)

ON_GPU = DEVICE == "cuda"
LOADS = [workload("mixed-rank", 7), workload("identical", 3), workload("skewed", 33 if ON_GPU else 5, rank=33)]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, [beside, bgmv, sgmv, tall, rms_norm_triton, rotary_triton, silu_mul_triton])


@pytest.fixture(autouse=True)
def _few_interpreted_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the interpreter milliseconds, with work or without; that they share out all of it, few show best."""
    if not ON_GPU:
        monkeypatch.setattr(tall, "SHRINK_PROGRAMS", 10)
        monkeypatch.setattr(tall, "EXPAND_PROGRAMS", 6)


class Case:
    """A projection's base output, what its adapters add, and their sum in float64."""

    def __init__(self, load: Workload, group: Group, dtype: torch.dtype) -> None:
        self.group, self.rows = group, len(load.row_slots)
        self.table = random_table(load.ranks, [group], 2, dtype, DEVICE)
        self.table.entries[0, 1, group.modules[-1], RANK] = 0  # an unadapted module
        self.y = random(self.rows, group.columns[-1], dtype=dtype)
        self.x = random(self.rows, group.in_features, dtype=dtype, seed=1)
        self.chunks = chunks_of(load, 1, DEVICE)
        self.delta = poisoned(self.rows, group.columns[-1], dtype=torch.float32)
        for part in (lora.small_delta, lora.tall_delta):
            part(self.delta, self.x, self.table, 1, group, self.chunks)
        self.wide = self.y.double()
        for slot, start, end in load.segments():
            for adapted in self.table.parts(slot, 1, group):
                shrunk = self.x[start:end].double() @ adapted.a.double()
                for each in adapted.expands:
                    product = shrunk[:, each.first : each.last] @ each.b.double()
                    self.wide[start:end, each.begin : each.end] += each.scale * product


@pytest.mark.parametrize("dtype", FEWER_DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS, ids=["mixed", "identical", "skewed"])
def test_silu_mul(load: Workload, dtype: torch.dtype) -> None:
    case = Case(load, Group((4, 5), (0, 264, 528), 64), dtype)
    expected, plain = silu_mul_reference(case.wide), silu_mul_reference(rounded_sum(case.y, case.delta))
    actual = silu_mul_triton.silu_mul(case.y, case.delta)
    assert_close(actual, expected)
    assert_no_worse(actual, plain, expected)
    assert_close(silu_mul(case.y.cpu(), case.delta.cpu()), expected)


@pytest.mark.parametrize("dtype", FEWER_DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS, ids=["mixed", "identical", "skewed"])
def test_add_rms_norm(load: Workload, dtype: torch.dtype) -> None:
    case = Case(load, Group((6,), (0, 264), 1040), dtype)
    weight, before = random(264, dtype=dtype, seed=2), random(case.rows, 264, dtype=dtype, seed=3)
    residual, other, wide = before.clone(), before.clone(), before.double()
    out = poisoned(case.rows, 264, dtype=dtype)
    assert rms_norm_triton.add_rms_norm(case.y, residual, weight, EPS, case.delta, out) is out
    plain = add_rms_norm(case.y.cpu(), other_cpu := other.cpu(), weight.cpu(), EPS, case.delta.cpu())
    assert torch.equal(residual.cpu(), other_cpu)
    expected = add_rms_norm_reference(case.wide, wide, weight.double(), EPS)
    assert_close(residual, wide)
    assert_close(out, expected)
    assert_no_worse(out.cpu(), plain, expected.cpu())


SHAPES = [(9, 3, 64), (14, 2, 80)] if ON_GPU else [(3, 1, 24), (4, 2, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "norm"), [(SHAPES[0], False), (SHAPES[1], True)], ids=str)
def test_rotary_kv_write(shape: tuple[int, int, int], dtype: torch.dtype, norm: bool) -> None:
    heads, kv_heads, head_dim = shape
    q, k = heads * head_dim, kv_heads * head_dim
    case = Case(LOADS[0], Group((0, 1, 2), (0, q, q + k, q + 2 * k), 48), dtype)
    table = rotary_table(1e4 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim), 70)
    positions, slots = torch.arange(7, device=DEVICE) * 9, torch.arange(7, device=DEVICE) * 4 - 1
    weights = [random(head_dim, dtype=dtype, seed=seed) for seed in (4, 5)]

    def run(op: object, qkv: Tensor, **more: object) -> tuple[Tensor, Tensor, Tensor]:
        caches = [poisoned(2, 16, kv_heads, head_dim, dtype=qkv.dtype) for _ in range(2)]
        head_norm = HeadNorm(*(weight.to(qkv.dtype) for weight in weights), 1e-6) if norm else None
        return op(qkv, table, positions, slots, *caches, head_norm, **more), *caches

    actual = run(rotary_triton.rotary_kv_write, case.y, delta=case.delta)
    plain = run(rotary_kv_write_reference, case.y, delta=case.delta)
    expected = run(rotary_kv_write_reference, case.wide)
    for got, reference_, truth in zip(actual, plain, expected, strict=True):
        written = ~truth.isnan()
        assert torch.equal(~got.isnan(), written)
        # A norm divides by the size of what is normed, and the error that was there with it.
        assert_close(got[written], reference_[written].double())
        assert_no_worse(got[written], reference_[written], truth[written])
    kept = slots[slots >= 0]
    added = rounded_sum(case.y, case.delta)
    assert torch.equal(actual[2].flatten(0, 1)[kept].flatten(1), added[slots >= 0, q + k :])


def test_the_rotary_door_on_a_cpu() -> None:
    table = rotary_table(torch.ones(2), 8)
    qkv, delta = (
        random(2, 12, dtype=torch.float32, device="cpu"),
        random(2, 12, dtype=torch.float32, device="cpu", seed=1),
    )
    positions, slots = torch.tensor([3, 5]), torch.tensor([0, 1])
    caches = [poisoned(1, 2, 1, 4, dtype=torch.float32, device="cpu") for _ in range(4)]
    got = rotary_kv_write(qkv, table, positions, slots, caches[0], caches[1], delta=delta)
    assert torch.equal(got, rotary_kv_write(qkv + delta, table, positions, slots, caches[2], caches[3]))
    assert torch.equal(caches[1], caches[3])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
@pytest.mark.parametrize("rows", [8, 32, 64, 160, 640])
@pytest.mark.parametrize("name", ["distinct", "all-ranks", "mixed-rank"])
def test_a_graph_equals_eager(name: str, rows: int) -> None:
    """Launches that overlap wait for what comes before them and for what runs beside them."""
    load = workload(name, rows)
    chunks = chunks_of(load, lora.rows_per_chunk(rows), DEVICE)
    group = Group((4, 5), (0, 14336, 28672), 4096)
    case = Case(load, group, torch.bfloat16)
    weight = random(28672, 4096, dtype=torch.bfloat16, seed=1) / 64
    sides = beside.Sides(torch.cuda.Stream(), torch.cuda.Stream())

    def step() -> Tensor:
        y, delta = beside.product_and_delta(lambda x: x @ weight.t(), case.x, case.table, 1, group, chunks, sides)
        return silu_mul(y, delta)

    expected = step()
    y = case.x @ weight.t()
    lora.add_chunks(y, case.x, case.table, 1, group, chunks)
    assert_no_worse(
        expected, silu_mul(y), silu_mul_reference(case.wide - case.y.double() + case.x.double() @ weight.double().t())
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step() for _ in range(8)]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
@pytest.mark.parametrize("rows_per_chunk", [16, 64])
def test_chunks_of_many_rows_are_added_at_once(rows_per_chunk: int) -> None:
    load, group = workload("skewed", 133), Group((4, 5), (0, 264, 528), 64)
    case = Case(load, group, torch.bfloat16)
    chunks = chunks_of(load, rows_per_chunk, DEVICE)
    sides = beside.Sides(torch.cuda.Stream(), torch.cuda.Stream())
    y, delta = beside.product_and_delta(lambda x: case.y.clone(), case.x, case.table, 1, group, chunks, sides)
    assert delta is None
    assert_close(y, case.wide)
