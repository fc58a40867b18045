"""Floating-point numbers of adapter files → the engine's dtype, by numpy. bfloat16 is held as its 16 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.adapter_format.floats import WIDENED, to_float32
from shared.adapter_format.reasons import tensor_invalid

# What an array of each dtype is stored as in a blob.
STORAGE: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
FILE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 32 << 10  # numbers whose intermediate forms stay in a core's cache


def convert(tensor: str, data: memoryview, source: str, target: str, out: NDArray[Any]) -> None:
    """Write the finite numbers in `data` to `out`, rounded to nearest, ties to even.

    Args:
        tensor: Name for the error.
        data: As many numbers as `out` has, in the order of its rows.
        source: F32, F16 or BF16: how `data` holds them, little-endian.
        target: float32, float16 or bfloat16.
        out: `[rows, columns]` of `STORAGE[target]`, with any strides.

    Raises:
        AdapterInvalid: a number is beyond the range of `target`.
    """
    dtype = FILE_NAMES[source]
    numbers: NDArray[Any] = np.frombuffer(data, STORAGE[dtype]).reshape(out.shape)
    if dtype == target:
        out[:] = numbers
        return
    rows = max(_PIECE // out.shape[1], 1)
    for start in range(0, len(out), rows):
        piece = _converted(tensor, numbers[start : start + rows], dtype, target)
        out[start : start + rows] = piece


def widened_file(dtype: str, data: memoryview) -> tuple[str, memoryview]:
    """Numbers of a file, those of a dtype that no blob has as float32: their dtype (F32, F16 or BF16) and bytes."""
    if dtype not in WIDENED:
        return dtype, data
    return "F32", to_float32(dtype, data).data.cast("B")


def widened(numbers: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """What an array of `STORAGE[dtype]` holds, as float32."""
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32, copy=False)


def _converted(tensor: str, numbers: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    if source == "bfloat16":
        numbers = widened(numbers, source)
    if target == "bfloat16":
        result = _to_bfloat16(numbers.astype(np.float32, copy=False).view(np.uint32))
        overflows = source == "float32" and bool((result & np.uint16(0x7F80) == 0x7F80).any())
    else:
        with np.errstate(over="ignore"):
            result = numbers.astype(STORAGE[target], copy=False)
        overflows = target == "float16" and bool(np.isinf(result).any())
    if overflows:
        raise tensor_invalid(tensor, f"holds a number beyond the range of {target}", "serve with another --dtype")
    return result


def _to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The upper halves of finite float32 numbers: adding 0x7FFF, and 1 more where the kept half is odd, rounds them."""
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)
