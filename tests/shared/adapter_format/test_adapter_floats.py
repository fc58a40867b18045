"""Numbers of every floating-point dtype become the float32 that torch makes of them."""

import pytest
import torch

from shared.adapter_format.finite import check_finite
from shared.adapter_format.floats import FLOATS, to_float32
from shared.errors import AdapterInvalid

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def every(dtype):
    """All numbers of a dtype, or many of the larger ones, those at their ends included."""
    of_size = {1: torch.uint8, 2: torch.int16}
    item = TORCH[dtype].itemsize
    if item in of_size:
        return torch.arange(1 << 8 * item).to(of_size[item]).view(TORCH[dtype])
    ends = torch.tensor([0.0, -0.0, 3.4e38, -3.41e38, 3.4028235677973366e38, 1e-45, 1e-300, torch.nan, -torch.inf])
    return torch.cat([ends.double(), torch.randn(1000).double() * 1e20, torch.randn(1000).double() * 1e-39]).to(
        TORCH[dtype]
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_as_torch(dtype):
    numbers = every(dtype)
    found = torch.from_numpy(to_float32(dtype, numbers.view(torch.uint8).numpy().tobytes()).copy())
    assert torch.equal(found.nan_to_num(0, 1e39, -1e39), numbers.float().nan_to_num(0, 1e39, -1e39))
    assert torch.equal(found.isnan(), numbers.isnan())


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_is_what_is_finite_in_float32(dtype):
    numbers = every(dtype)
    isfinite = numbers.float().isfinite()
    chosen = [*numbers[isfinite][::97], *numbers[~isfinite][::7]]
    assert len({bool(number.float().isfinite()) for number in chosen}) == 2
    for number in chosen:
        data = number.reshape(1).view(torch.uint8).numpy().tobytes()
        if number.float().isfinite():
            check_finite("x", dtype, data)
        else:
            with pytest.raises(AdapterInvalid, match="holds NaN"):
                check_finite("x", dtype, data)
