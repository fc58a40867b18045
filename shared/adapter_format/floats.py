"""Numbers of any floating-point dtype that a safetensors file may hold, as float32: what PEFT loads them into.

float64 is rounded to nearest; all others are exact. An 8-bit float is read from a table of all 256.
"""

import numpy as np
from numpy.typing import NDArray

WIDENED = ("F64", "F8_E4M3", "F8_E5M2")
FLOATS = ("F32", "F16", "BF16", *WIDENED)


def to_float32(dtype: str, data: bytes | bytearray | memoryview) -> NDArray[np.float32]:
    """The numbers in `data`, flat. `dtype`: one of FLOATS, little-endian; what is beyond float32 becomes infinite."""
    match dtype:
        case "BF16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "F8_E4M3":
            return _E4M3[np.frombuffer(data, np.uint8)]
        case "F8_E5M2":
            return _E5M2[np.frombuffer(data, np.uint8)]
    with np.errstate(over="ignore"):
        return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def _e4m3() -> NDArray[np.float32]:
    """4 bits of exponent and 3 of mantissa, no infinity; NaN where all seven are set."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3()
_E5M2 = (np.arange(256, dtype="<u2") << np.uint16(8)).view("<f2").astype(np.float32)  # the upper half of a float16
