"""The activation's kernel against its reference, and both against float64."""

import pytest
import torch
from torch.nn.functional import silu

from kernels.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.poisoning import DTYPES, assert_close, assert_no_worse, poison_empty, poisoned, random

triton = pytest.importorskip("triton")
from kernels import silu_mul_triton  # noqa: E402  the interpreter is chosen by conftest


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, [silu_mul_triton])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 33), (3, 1024), (7, 1025), (33, 128), (0, 8)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * random(rows, 2 * size + 3, dtype=dtype)[:, : 2 * size]
    actual = silu_mul_triton.silu_mul(gate_up)
    expected = silu_mul_reference(gate_up.double())
    gate, up = gate_up.chunk(2, -1)
    assert_close(actual, expected)
    assert_close(silu_mul_reference(gate_up), expected)
    assert_no_worse(actual, silu(gate) * up, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy; 1 / inf is meant
def test_extreme_gates() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]], device=random(1, dtype=torch.float32).device)
    assert silu_mul_triton.silu_mul(gate_up).tolist() == [[0.0, 3e4, 0.0]]


def test_the_door_on_a_cpu() -> None:
    gate_up = random(3, 8, dtype=torch.float32, device="cpu")
    out = poisoned(3, 4, dtype=torch.float32, device="cpu")
    assert silu_mul(gate_up, out=out) is out
    assert torch.equal(out, silu_mul(gate_up))
