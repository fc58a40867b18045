"""For the tests of kernels: buffers that an op allocates hold NaN (or a huge integer) until the op writes them."""

from collections.abc import Iterable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
# On a machine without a GPU the kernels run in the interpreter, which knows no bfloat16 product.
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]),
)
# For what is tried in float16 elsewhere too, and takes the interpreter long.
FEWER_DTYPES = (
    torch.float32,
    pytest.param(torch.float16, marks=[] if HAS_GPU else [pytest.mark.slow]),
    DTYPES[-1],
)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def poisoned(*shape: int, dtype: torch.dtype, device: str = DEVICE) -> Tensor:
    """A buffer whose contents must not be read."""
    return torch.full(
        shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype, device=device
    )


def poison_empty(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> None:
    """In `modules`, `torch.empty` gives poisoned buffers."""

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return poisoned(*shape, dtype=dtype, device=str(device))

    class PoisonedTorch(ModuleType):
        def __getattr__(self, name: str) -> object:
            return empty if name == "empty" else getattr(torch, name)

    for module in modules:
        monkeypatch.setattr(module, "torch", PoisonedTorch("torch"))


def random(*shape: int, dtype: torch.dtype, seed: int = 0, device: str = DEVICE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """`expected` is in float64; the tolerance follows from `actual`'s dtype."""
    tolerance = TOLERANCES[actual.dtype]
    np.testing.assert_allclose(actual.double().cpu().numpy(), expected.cpu().numpy(), rtol=tolerance, atol=tolerance)


def assert_no_worse(actual: Tensor, plain: Tensor, expected: Tensor) -> None:
    """In bfloat16, the RMS error against float64 is at most 1.1 times that of plain PyTorch."""
    if actual.dtype == torch.bfloat16 and actual.numel():
        errors = [(each.double() - expected).pow(2).mean().sqrt().item() for each in (actual, plain)]
        assert errors[0] <= 1.1 * errors[1]
