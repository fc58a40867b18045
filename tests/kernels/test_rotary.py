"""Rotation and KV write: the kernel against the reference, and both against float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.rotary import HeadNorm, rotary_kv_write, rotary_kv_write_reference, rotary_table
from tests.kernels.poisoning import DEVICE, DTYPES, assert_close, assert_no_worse, poison_empty, poisoned, random

triton = pytest.importorskip("triton")
from kernels import rotary_triton  # noqa: E402  the interpreter is chosen by conftest

MAX_POSITION = 70
BLOCKS, BLOCK_SIZE = 3, 16
SHAPES = [(1, 1, 1, 64), (3, 4, 2, 32), (7, 9, 3, 64), (2, 32, 8, 128), (5, 14, 2, 80)]


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, [rotary_triton])


class Result(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor


class Case:
    """`tokens` tokens of which every third is padding."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, norm: bool) -> None:
        self.qkv = random(tokens, (heads + 2 * kv_heads) * head_dim + 8, dtype=dtype)[:, :-8]
        frequencies = 1e4 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
        self.table = rotary_table(frequencies, MAX_POSITION, 1.2)
        generator = torch.Generator().manual_seed(1)
        self.positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator).to(DEVICE)
        self.slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens].to(DEVICE)
        self.slots[2::3] = -1
        weights = (random(head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
        self.norm = HeadNorm(*weights, 1e-6) if norm else None
        self.cache_shape = (BLOCKS, BLOCK_SIZE, kv_heads, head_dim)

    def run(self, op: object, dtype: torch.dtype) -> Result:
        caches = [poisoned(*self.cache_shape, dtype=dtype) for _ in range(2)]
        norm = self.norm and HeadNorm(self.norm.q_weight.to(dtype), self.norm.k_weight.to(dtype), self.norm.eps)
        q = op(self.qkv.to(dtype), self.table, self.positions, self.slots, *caches, norm)
        return Result(q, *caches)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_kv_write(shape: tuple[int, int, int, int], dtype: torch.dtype, norm: bool) -> None:
    case = Case(*shape, dtype, norm)
    before = case.qkv.clone()
    actual = case.run(rotary_triton.rotary_kv_write, dtype)
    plain = case.run(rotary_kv_write_reference, dtype)
    expected = case.run(rotary_kv_write_reference, torch.float64)
    assert torch.equal(case.qkv, before)
    for name in Result._fields:
        got, reference, truth = (getattr(each, name) for each in (actual, plain, expected))
        written = ~truth.isnan()
        assert torch.equal(~got.isnan(), written)  # the rest keeps its poison
        assert_close(got[written], truth[written])
        assert_close(reference[written], truth[written])
        assert_no_worse(got[written], reference[written], truth[written])
    kept = case.slots[case.slots >= 0]
    values = case.qkv.view_as(case.qkv)[case.slots >= 0, -shape[2] * shape[3] :]
    assert torch.equal(actual.v_cache.flatten(0, 1)[kept].flatten(1), values)


def test_it_can_run_twice_and_into_a_given_output() -> None:
    case = Case(3, 4, 2, 32, torch.float32, False)
    first = case.run(rotary_triton.rotary_kv_write, torch.float32)
    out = poisoned(3, 4, 32, dtype=torch.float32)
    caches = first.k_cache.clone(), first.v_cache.clone()
    rotary_triton.rotary_kv_write(case.qkv, case.table, case.positions, case.slots, *caches, q_out=out)
    assert torch.equal(out, first.q)
    assert torch.equal(caches[0].nan_to_num(), first.k_cache.nan_to_num())


def test_position_zero_turns_nothing() -> None:
    case = Case(3, 4, 2, 32, torch.float32, False)
    case.table /= 1.2
    case.positions.zero_()
    assert torch.equal(case.run(rotary_triton.rotary_kv_write, torch.float32).q.flatten(1), case.qkv[:, :128])


@pytest.mark.skipif(DEVICE == "cuda", reason="the door on a CPU")
def test_the_door_on_a_cpu() -> None:
    case = Case(3, 4, 2, 32, torch.float32, True)
    expected = case.run(rotary_kv_write_reference, torch.float32)
    actual = case.run(rotary_kv_write, torch.float32)
    assert torch.equal(actual.q, expected.q)
    assert torch.equal(actual.k_cache.nan_to_num(), expected.k_cache.nan_to_num())
