"""Floating-point numbers of adapter files → the engine's dtype, by numpy. bfloat16 is held as its 16 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.adapter_format.reasons import tensor_invalid

# What an array of each dtype is stored as in a blob.
STORAGE: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_FILE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def convert(tensor: str, data: memoryview, source: str, target: str) -> NDArray[Any]:
    """The finite numbers in `data` as a flat array of `STORAGE[target]`, rounded to nearest, ties to even.

    Args:
        tensor: Name for the error.
        source: F32, F16 or BF16: how `data` holds them, little-endian.
        target: float32, float16 or bfloat16.

    Raises:
        AdapterInvalid: a number is beyond the range of `target`.
    """
    dtype = _FILE_NAMES[source]
    numbers: NDArray[Any] = np.frombuffer(data, STORAGE[dtype])
    if dtype == target:
        return numbers
    if dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if target == "bfloat16":
        result = _to_bfloat16(numbers.astype(np.float32, copy=False).view(np.uint32))
        overflows = dtype == "float32" and bool((result & np.uint16(0x7F80) == 0x7F80).any())
    else:
        with np.errstate(over="ignore"):
            result = numbers.astype(STORAGE[target], copy=False)
        overflows = target == "float16" and bool(np.isinf(result).any())
    if overflows:
        raise tensor_invalid(tensor, f"holds a number beyond the range of {target}; serve with another --dtype")
    return result


def _to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The upper halves of finite float32 numbers: adding 0x7FFF, and 1 more where the kept half is odd, rounds them."""
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)
