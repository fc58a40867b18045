"""Gains and offsets of adapters' linears: the kernel and the reference against float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.affine import apply_affine, apply_affine_reference
from kernels.table import OFFSET_UNIT, AdapterTable, Group
from kernels.workloads import chunks_of, random_table, workload
from tests.kernels.poisoning import DEVICE, DTYPES, assert_close, assert_no_worse, random

pytest.importorskip("triton")
from kernels import affine_triton

GROUP = Group((0, 1, 2), (0, 1100, 1164, 1228), 16)
LAYER = 1


def with_vectors(table: AdapterTable, group: Group) -> AdapterTable:
    """`table` with a gain, an offset, both or neither for each slot and module; elsewhere its arena stays as it is."""
    slots = table.entries.shape[0]
    parts: list[Tensor] = [table.weights.view(torch.uint8)]
    affines = torch.full((slots, table.num_layers, 7, 2), -1, dtype=torch.int32)
    end = parts[0].numel()
    for slot in range(slots):
        for module, first, last in zip(group.modules, group.columns[:-1], group.columns[1:], strict=True):
            for which in (0, 1):
                if (slot + module) >> which & 1:
                    vector = random(last - first, dtype=torch.float32, seed=97 * slot + 7 * module + which)
                    filling = torch.full((-(-vector.nbytes // OFFSET_UNIT) * OFFSET_UNIT - vector.nbytes,), 255)
                    affines[slot, LAYER, module, which] = end // OFFSET_UNIT
                    parts += [vector.view(torch.uint8), filling.to(DEVICE, torch.uint8)]
                    end += vector.nbytes + filling.numel()
    weights = torch.cat(parts).view(table.weights.dtype)
    return AdapterTable(weights, table.entries, affines=affines.to(DEVICE))


def cases(
    name: str, rows: int, rows_per_chunk: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """What the kernel makes of y, of delta, and the same in float64; with a delta and without."""
    load = workload(name, rows)
    table = with_vectors(random_table(load.ranks, [GROUP], 2, dtype, DEVICE), GROUP)
    chunks = chunks_of(load, rows_per_chunk, DEVICE)
    for has_delta in (True, False):
        y = random(rows, GROUP.columns[-1], dtype=dtype)
        delta = random(rows, GROUP.columns[-1], dtype=torch.float32, seed=1) if has_delta else None
        wide, plain = y.double(), y.clone()
        wide_delta = None if delta is None else delta.double()
        plain_delta = None if delta is None else delta.clone()
        affine_triton.apply_affine(y, delta, table, LAYER, GROUP, chunks)
        apply_affine_reference(wide, wide_delta, table, LAYER, GROUP, chunks)
        apply_affine_reference(plain, plain_delta, table, LAYER, GROUP, chunks)
        assert_no_worse(y, plain, wide)
        yield y, delta, wide
        if delta is not None and wide_delta is not None:
            assert torch.equal(delta.double(), wide_delta)
            assert torch.equal(delta.signbit(), wide_delta.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "rows", "rows_per_chunk"), [("mixed-rank", 7, 1), ("skewed", 9, 16), ("mixed-rank", 33, 64)]
)
def test_affine(name: str, rows: int, rows_per_chunk: int, dtype: torch.dtype) -> None:
    for y, _, wide in cases(name, rows, rows_per_chunk, dtype):
        assert_close(y, wide)


def test_the_reference_is_right() -> None:
    """Row by row, from the vectors themselves."""
    load = workload("mixed-rank", 7)
    table = with_vectors(random_table(load.ranks, [GROUP], 2, torch.float32, DEVICE), GROUP)
    y, delta = (random(7, GROUP.columns[-1], dtype=torch.float32, seed=seed) for seed in (0, 1))
    expected, floats = (y + delta).double(), table.weights.view(torch.float32).double()
    touched = torch.zeros_like(y, dtype=torch.bool)
    for row, slot in enumerate(load.row_slots):
        for index, module in enumerate(GROUP.modules if slot >= 0 else ()):
            first, last = GROUP.columns[index : index + 2]
            for which, at in enumerate(table.affines[slot, LAYER, module].tolist()):
                if at >= 0:
                    vector = floats[at * 4 : at * 4 + last - first]
                    expected[row, first:last] = (expected[row, first:last] * vector) if which == 0 else (
                        expected[row, first:last] + vector
                    )  # fmt: skip
                    touched[row, first:last] = True
    before = delta.clone()
    apply_affine(y, delta, table, LAYER, GROUP, chunks_of(load, 1, DEVICE))
    assert_close(y + delta, expected)
    assert touched.any()
    assert not touched.all()
    assert torch.equal(delta[~touched], before[~touched])
    assert (delta[touched] == 0).all()
    assert delta[touched].signbit().all()
