"""RMSNorm's kernel against its reference, and both against float64."""

import pytest
import torch

from kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.poisoning import DTYPES, assert_close, assert_no_worse, poison_empty, poisoned, random

triton = pytest.importorskip("triton")
from kernels import rms_norm_triton  # noqa: E402  the interpreter is chosen by conftest

EPS = 1e-5


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, [rms_norm_triton])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (2, 33), (7, 576), (3, 1000), (1, 4096), (0, 64)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    actual = rms_norm_triton.rms_norm(x, weight, EPS)
    plain = rms_norm_reference(x, weight, EPS)
    expected = rms_norm_reference(x.double(), weight.double(), EPS)
    assert_close(actual, expected)
    assert_close(plain, expected)
    assert_no_worse(actual, plain, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 33), (2, 1000)])
def test_add_rms_norm_rounds_the_sum_first(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 2 * size, dtype=dtype)[:, :size], random(size, dtype=dtype, seed=1)
    residual = random(rows, size, dtype=dtype, seed=2)
    other = residual.clone()
    out = poisoned(rows, size, dtype=dtype)
    assert rms_norm_triton.add_rms_norm(x, residual, weight, EPS, out=out) is out
    plain = add_rms_norm_reference(x, other, weight, EPS)
    assert torch.equal(residual, other)
    expected = rms_norm_reference(other.double(), weight.double(), EPS)
    assert_close(out, expected)
    assert_no_worse(out, plain, expected)


def test_a_row_depends_on_no_other_row() -> None:
    x, weight = random(7, 576, dtype=torch.float32), random(576, dtype=torch.float32, seed=1)
    together = rms_norm_triton.rms_norm(x, weight, EPS)
    assert torch.equal(rms_norm_triton.rms_norm(x[3:4], weight, EPS)[0], together[3])


def test_the_doors_on_a_cpu() -> None:
    x, weight = random(3, 8, dtype=torch.float32, device="cpu"), torch.ones(8)
    expected = rms_norm_reference(x, weight, EPS)
    out = torch.empty_like(x)
    assert rms_norm(x, weight, EPS, out) is out
    assert torch.equal(out, expected)
    residual = torch.zeros_like(x)
    assert torch.equal(add_rms_norm(x, residual, weight, EPS), expected)
    assert torch.equal(residual, x)
