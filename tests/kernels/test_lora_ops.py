"""bgmv, tall and sgmv against the reference, and the reference against float64, over the named workloads."""

import os
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import lora, reference
from kernels.table import (
    A_OFFSET,
    B_OFFSET,
    OFFSET_UNIT,
    RANK,
    SCALE,
    AdapterTable,
    Chunks,
    Group,
    LoraRows,
    Segment,
    chunk_list,
    max_chunks,
)
from kernels.workloads import NAMES, Workload, chunks_of, random_table, workload

triton = pytest.importorskip("triton")
from kernels import bgmv, sgmv, tall  # noqa: E402  the interpreter is chosen by conftest

QKV = Group((0, 1, 2), (0, 133, 166, 199), 33)
O_PROJ = Group((3,), (0, 7), 133)
GATE_UP = Group((4, 5), (0, 288, 576), 64)
DOWN = Group((6,), (0, 64), 1040)
GROUPS = (QKV, O_PROJ, GATE_UP, DOWN)
ROWS = (1, 2, 3, 7, 33, 133)
LAYER = 1
EVERY_RANK = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 200, 511, 512)

HAS_GPU = torch.cuda.is_available()
# In the interpreter a program costs milliseconds, so it sees a few rows of each workload.
INTERPRETED_ROWS = (1, 3, 7)


def on_gpu(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.gpu)


# By the rows of a chunk: bgmv and tall take one, sgmv sixteen or many.
KERNELS = {"decode": 1, "sgmv-16": 16, "sgmv-64": 64}


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that an op allocates holds NaN until the op writes it."""

    def empty(*args: object, **kwargs: object) -> Tensor:
        return torch.full(*args, float("nan"), **kwargs)

    class PoisonedTorch(ModuleType):
        def __getattr__(self, name: str) -> object:
            return empty if name == "empty" else getattr(torch, name)

    for module in (bgmv, sgmv, tall, reference):
        monkeypatch.setattr(module, "torch", PoisonedTorch("torch"))


@pytest.fixture(autouse=True)
def _few_interpreted_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the interpreter milliseconds, with work or without; that they share out all of it, few show best."""
    if not HAS_GPU:
        monkeypatch.setattr(tall, "SHRINK_PROGRAMS", 10)
        monkeypatch.setattr(tall, "EXPAND_PROGRAMS", 6)


@pytest.fixture(autouse=True)
def _no_gpu_no_gpu_tests(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("no CUDA device")


class Case:
    """Inputs of one call, and its result in float64 before rounding."""

    def __init__(self, load: Workload, group: Group, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.load, self.group = load, group
        self.table = random_table(load.ranks, [group], 2, dtype, device, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        rows, out = len(load.row_slots), group.columns[-1]
        self.x = torch.randn(rows, group.in_features, generator=generator).to(device, dtype)
        self.y = torch.randn(rows, out, generator=generator).to(device, dtype)
        self.row_slots = torch.tensor(load.row_slots, dtype=torch.int32, device=device)

    def run(self, op: str) -> Tensor:
        if op == "reference":
            y = self.y.clone()
            v = reference.bgmv_shrink(self.x, self.table, LAYER, self.group, self.row_slots)
            reference.bgmv_expand(y, v, self.table, LAYER, self.group, self.row_slots)
            return y
        return self.run_chunks(chunks_of(self.load, KERNELS[op], str(self.x.device)))

    def run_chunks(self, chunks: Chunks) -> Tensor:
        y = self.y.clone()
        lora.add_chunks(y, self.x, self.table, LAYER, self.group, chunks)
        return y

    def add(self) -> Tensor:
        """Through `reference.add_lora`, the path that serves on a CPU."""
        y = self.y.clone()
        reference.add_lora(y, self.x, self.table, LAYER, self.group, self.load.segments())
        return y

    def expected(self) -> np.ndarray:
        """In float64, straight from the entries, row by row."""
        weights = self.table.weights.double().cpu().numpy()
        unit = OFFSET_UNIT // self.table.weights.element_size()
        x, y = self.x.double().cpu().numpy(), self.y.double().cpu().numpy().copy()
        for row, slot in enumerate(self.load.row_slots):
            for index, module in enumerate(self.group.modules if slot >= 0 else ()):
                entry = self.table.entries[slot, LAYER, module].tolist()
                begin, end = self.group.columns[index : index + 2]
                rank, a, b = entry[RANK], entry[A_OFFSET] * unit, entry[B_OFFSET] * unit
                a = weights[a : a + rank * x.shape[1]].reshape(rank, x.shape[1])
                b = weights[b : b + rank * (end - begin)].reshape(rank, end - begin)
                y[row, begin:end] += self.table.scales[slot, LAYER, module, SCALE].item() * (x[row] @ a.T @ b)
        return y

    def plain(self) -> Tensor:
        """What plain PyTorch gives in this dtype: each product accumulates in float32 and rounds."""
        y = self.y.clone()
        for slot, start, end in self.load.segments():
            for part in self.table.parts(slot, LAYER, self.group):
                v = self.x[start:end] @ part.a
                for expand in part.expands:
                    delta = (v[:, expand.first : expand.last] @ expand.b) * expand.scale
                    y[start:end, expand.begin : expand.end] += delta
        return y


def rms(actual: Tensor, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((actual.double().cpu().numpy() - expected) ** 2)))


def assert_close(actual: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    np.testing.assert_allclose(actual.double().cpu().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 133, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 3, 33))])
@pytest.mark.parametrize("name", NAMES)
def test_reference_is_right(name: str, rows: int, dtype: torch.dtype) -> None:
    for group in GROUPS:
        case = Case(workload(name, rows), group, dtype)
        expected = case.expected()
        assert_close(case.run("reference"), expected, dtype)
        assert_close(case.add(), expected, dtype)


@pytest.mark.skipif(HAS_GPU, reason="covered by the same test on the GPU")
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (1, torch.float32),
        (3, torch.float16),
        (7, torch.float32),
        pytest.param(7, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", list(KERNELS))
def test_interpreted_kernels_are_right(op: str, name: str, rows: int, dtype: torch.dtype) -> None:
    group = GROUPS[(INTERPRETED_ROWS.index(rows) + NAMES.index(name)) % len(GROUPS)]
    case = Case(workload(name, rows), group, dtype)
    assert_close(case.run(op), case.expected(), dtype)


@pytest.mark.skipif(HAS_GPU, reason="covered by the same test on the GPU")
@pytest.mark.parametrize(("op", "rows"), [("decode", 33), ("sgmv-16", 133), ("sgmv-64", 133)])
def test_interpreted_kernels_on_many_rows(op: str, rows: int) -> None:
    case = Case(workload("mixed-rank", rows), O_PROJ, torch.float32)
    assert_close(case.run(op), case.expected(), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", list(KERNELS))
def test_kernels_are_right_on_the_gpu(op: str, name: str, rows: int, dtype: torch.dtype) -> None:
    for group in GROUPS:
        case = Case(workload(name, rows), group, dtype, "cuda")
        expected = case.expected()
        assert_close(case.run(op), expected, dtype)


@pytest.mark.parametrize("rows", [33, 133])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("op", "device"), [("reference", "cpu"), *(on_gpu(op, "cuda") for op in KERNELS)])
def test_bfloat16_is_no_worse_than_plain_pytorch(op: str, device: str, name: str, rows: int) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for group in GROUPS:
        case = Case(workload(name, rows), group, torch.bfloat16, device)
        expected = case.expected()
        assert rms(case.run(op), expected) <= rms(case.plain(), expected)
        if device == "cpu":
            assert rms(case.add(), expected) <= rms(case.plain(), expected)


DEVICES = ["cpu", on_gpu("cuda")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(  # of rank 3, 64 and 200
    "slot", [1, pytest.param(3, marks=[] if HAS_GPU else pytest.mark.slow), 4]
)
@pytest.mark.parametrize("op", list(KERNELS))
def test_a_row_depends_on_no_other_row(op: str, slot: int, device: str) -> None:
    """The first row of a bucket keeps its bits whatever the others are, and whichever share its adapter."""
    if device == "cpu" and HAS_GPU:
        pytest.skip("the interpreter is off")
    bucket = 129 if device == "cuda" else 9
    mixed = workload("mixed-rank", bucket)._replace(row_slots=tuple(sorted(1 + row % 3 for row in range(bucket))))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    alone = Case(mixed, QKV, dtype, device)
    room = chunks_of(mixed, KERNELS[op]).list.shape[0] + bucket
    expected = None
    for rows in (1, 2, 31, 32, 33, 127, 128, 129) if device == "cuda" else (1, 2, 9):
        segments = [Segment(slot, 0, 1), Segment(2, 1, rows)] if rows % 2 else [Segment(slot, 0, rows)]
        listed = chunk_list([each for each in segments if each.start < each.end], KERNELS[op], room, bucket)
        alone.x[1:].normal_()
        got = alone.run_chunks(Chunks(torch.from_numpy(listed).to(device), KERNELS[op]))[0]
        expected = got if expected is None else expected
        assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(KERNELS))
def test_a_graph_replays_with_another_work_list(op: str) -> None:
    cases = [Case(workload(name, 33), QKV, torch.bfloat16, "cuda") for name in ("distinct", "uniform", "skewed")]
    room = 33 + 33
    lists = [torch.from_numpy(chunk_list(case.load.segments(), KERNELS[op], room, 33)).to("cuda") for case in cases]
    static, table = cases[0], random_table([16] * 64, [QKV], 2, torch.bfloat16, "cuda")
    for case in cases:
        case.table = table
    chunks = Chunks(lists[0].clone(), KERNELS[op])
    static.run_chunks(chunks)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = static.run_chunks(chunks)
    for case, listed in zip(cases, lists, strict=True):
        static.x.copy_(case.x)
        static.y.copy_(case.y)
        chunks.list.copy_(listed)
        graph.replay()
        assert torch.equal(y, case.run_chunks(Chunks(listed, KERNELS[op])))
        assert_close(y, case.expected(), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), on_gpu("cuda", torch.float16), on_gpu("cuda", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("op", list(KERNELS))
def test_every_rank(op: str, device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and HAS_GPU:
        pytest.skip("the interpreter is off")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for group in (GATE_UP, O_PROJ) if device == "cuda" else (O_PROJ,):
        case = Case(Workload(EVERY_RANK, tuple(range(len(EVERY_RANK)))), group, dtype, device)
        actual, expected = case.run(op), case.expected()
        assert_close(actual, expected, dtype)
        if dtype == torch.bfloat16:
            assert rms(actual, expected) <= rms(case.plain(), expected)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 16])
def test_chunks_cover_every_row_once(rows_per_chunk: int) -> None:
    for name in NAMES:
        for rows in ROWS:
            load = workload(name, rows)
            room = max_chunks(rows + 2, len(set(load.row_slots)), rows_per_chunk)
            slots: list[int | None] = [None] * (rows + 2)
            for slot, first, count, _ in chunk_list(load.segments(), rows_per_chunk, room, rows + 2).tolist():
                assert count <= rows_per_chunk
                for row in range(first, first + count):
                    assert slots[row] is None
                    slots[row] = slot
            assert slots == [*load.row_slots, -1, -1]


def test_too_many_chunks() -> None:
    with pytest.raises(ValueError, match="3 chunks do not fit in 2"):
        chunk_list([Segment(0, 0, 33)], 16, 2, 33)


def test_tiles_are_neighbouring_rows_of_one_adapter() -> None:
    listed = chunk_list([Segment(3, 1, 20), Segment(5, 20, 22)], 1, 23, 23)
    tiles = {row: (slot, size) for slot, row, _, size in listed.tolist() if size}
    assert tiles == {0: (-1, 1), 1: (3, 16), 17: (3, 3), 20: (5, 2), 22: (-1, 1)}


def test_no_rows_take_no_chunks() -> None:
    assert chunk_list([], 16, 2, 0).tolist() == [[-1, 0, 0, 0]] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [*KERNELS, "reference"])
def test_base_rows_and_unadapted_modules_keep_their_bits(op: str, device: str) -> None:
    if device == "cpu" and HAS_GPU and op != "reference":
        pytest.skip("the interpreter is off")
    case = Case(workload("mixed-rank", 7), QKV, torch.float16, device)
    case.table.entries[:, LAYER, 1, RANK] = 0
    case.y[0, 0] = -0.0
    base = case.row_slots == -1
    case.x[base] = float("nan")
    y = case.run(op)
    assert base.any()
    assert torch.equal(y[base], case.y[base])
    assert torch.equal(y[:, 133:166], case.y[:, 133:166])
    assert not torch.equal(y[~base][:, 166:], case.y[~base][:, 166:])
    assert_close(y[~base], case.expected()[~base.cpu().numpy()], torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_deltas_are_what_is_added(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and HAS_GPU:
        pytest.skip("the interpreter is off")
    case = Case(workload("mixed-rank", 7), QKV, dtype, device)
    case.table.entries[:, LAYER, 1, RANK] = 0  # k is not adapted
    chunks = chunks_of(case.load, 1, device)
    delta = torch.full(case.y.shape, float("nan"), device=device)
    for part in (lora.small_delta, lora.tall_delta):
        part(delta, case.x, case.table, LAYER, QKV, chunks)
    assert_close(reference.rounded_sum(case.y, delta), case.expected(), dtype)
    nothing = torch.cat((delta[case.row_slots == -1].flatten(), delta[:, 133:166].flatten()))
    assert (nothing == 0).all()
    assert nothing.signbit().all()


def test_gaps_between_a_blocks_are_not_assumed_away() -> None:
    case = Case(workload("uniform", 7, rank=3), Group((4, 5), (0, 5, 10), 3), torch.float32)
    parts = case.table.parts(0, LAYER, case.group)
    assert [len(part.expands) for part in parts] == [1, 1]  # 3 · 3 float32 are no multiple of 16 bytes
    assert_close(case.add(), case.expected(), torch.float32)


def test_consecutive_a_blocks_take_one_product() -> None:
    table = random_table([8], [GATE_UP], 2)
    (part,) = table.parts(0, LAYER, GATE_UP)
    assert part.a.shape == (64, 16)
    assert table.parts(0, LAYER, GATE_UP)[0] is part


def test_a_changed_slot_is_seen_after_forget() -> None:
    case = Case(workload("identical", 3), QKV, torch.float32)
    case.add()
    case.table.scales[0, LAYER, :, SCALE] *= 2
    case.table.forget(0)
    assert_close(case.add(), case.expected(), torch.float32)


def test_the_number_of_threads_is_restored() -> None:
    threads = torch.get_num_threads()
    case = Case(workload("identical", 33), QKV, torch.float32)
    case.add()
    assert torch.get_num_threads() == threads


def test_the_door_on_a_cpu() -> None:
    case = Case(workload("mixed-rank", 33), QKV, torch.float32)
    y = case.y.clone()
    lora.add_lora(y, case.x, case.table, LAYER, QKV, LoraRows(case.load.segments(), None))
    assert_close(y, case.expected(), torch.float32)
    lora.add_lora(y, case.x, case.table, LAYER, QKV, LoraRows((), None))
    assert_close(y, case.expected(), torch.float32)


@pytest.mark.gpu
def test_the_door_on_a_gpu() -> None:
    for group in GROUPS:
        for size in KERNELS.values():
            case = Case(workload("mixed-rank", 33), group, torch.bfloat16, "cuda")
            y = case.y.clone()
            rows = LoraRows(case.load.segments(), chunks_of(case.load, size, "cuda"))
            lora.add_lora(y, case.x, case.table, LAYER, group, rows)
            assert_close(y, case.expected(), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(KERNELS))
def test_no_count_compiles_again(op: str) -> None:
    kernels = [kernel for module in (bgmv, sgmv, tall) for kernel in (module._shrink, module._expand)]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    table = random_table([16] * 64, [GATE_UP], 2, torch.bfloat16, "cuda")
    for first in (True, False):
        for rows in (1, 2, 16, 33, 64) if first else (1, 3, 5, 32, 48):
            case = Case(workload("distinct", rows), GATE_UP, torch.bfloat16, "cuda")
            case.table = table
            case.run(op)
        if first:
            before = compiled()
    assert compiled() == before


def test_workloads() -> None:
    assert workload("distinct", 3).segments() == (Segment(0, 0, 1), Segment(1, 1, 2), Segment(2, 2, 3))
    mixed = workload("mixed-rank", 133)
    assert mixed.ranks == (1, 3, 8, 64, 200)
    assert -1 in mixed.row_slots
    assert sum(end - start for _, start, end in mixed.segments()) == 133 - mixed.row_slots.count(-1)
    with pytest.raises(ValueError, match="no workload 'other'"):
        workload("other", 3)


def test_the_interpreter_is_on_without_a_gpu() -> None:
    assert HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"


def test_table_is_viewed_not_copied() -> None:
    table: AdapterTable = random_table([4], [O_PROJ])
    (part,) = table.parts(0, 0, O_PROJ)
    assert part.a.data_ptr() == table.weights.data_ptr() + table.entries[0, 0, 3, A_OFFSET].item() * OFFSET_UNIT
