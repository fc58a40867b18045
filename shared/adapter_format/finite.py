"""No NaN and no Inf in an adapter's data: one such number would spoil every answer, silently."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.adapter_format.header import ITEM_SIZES, TensorInfo
from shared.adapter_format.reasons import tensor_invalid

# Unsigned and signed view of each dtype, and the bits of the least positive number that is not finite. Of float64,
# which is served as float32, it is the least that rounds to infinity there; F8_E4M3 has only NaN.
_EXPONENTS: Mapping[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "BF16": (np.uint16, np.int16, 0x7F80),
    "F16": (np.uint16, np.int16, 0x7C00),
    "F32": (np.uint32, np.int32, 0x7F800000),
    "F64": (np.uint64, np.int64, 0x47EFFFFFF0000000),
    "F8_E4M3": (np.uint8, np.int8, 0x7F),
    "F8_E5M2": (np.uint8, np.int8, 0x7C),
}
_PIECE_BYTES = 256 << 10  # stays in a core's cache


def check_finite(tensor: str, dtype: str, data: bytes | bytearray | memoryview) -> None:
    """Check consecutive elements of one tensor.

    Args:
        tensor: Its name, for the error.
        dtype: One of `floats.FLOATS`, little-endian.
        data: Whole elements.

    Raises:
        AdapterInvalid: one of them is NaN or infinite, or the dtype is not one of these.
    """
    if dtype not in _EXPONENTS:
        raise tensor_invalid(tensor, f"dtype {dtype} is no floating-point dtype that is served", "save it as float32")
    unsigned, signed, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data, unsigned)
    step = _PIECE_BYTES // ITEM_SIZES[dtype]
    negative = exponent | 1 << (8 * ITEM_SIZES[dtype] - 1)
    for start in range(0, len(bits), step):
        piece = bits[start : start + step]
        # As a signed number, only a positive one that is not finite is as large; as an unsigned one, a negative.
        if piece.view(signed).max() >= exponent or piece.max() >= negative:
            problem = "holds NaN or Inf" + ", or a number beyond float32" * (dtype == "F64")
            raise tensor_invalid(tensor, problem, "save a checkpoint from before training diverged")


def is_all_zero(dtype: str, data: bytes | bytearray | memoryview) -> bool:
    """Whether whole elements of a dtype that `check_finite` takes are all zero, of either sign."""
    unsigned, _, _ = _EXPONENTS[dtype]
    bits = np.frombuffer(data, unsigned)
    step = _PIECE_BYTES // ITEM_SIZES[dtype]
    # Adding a number to itself shifts the sign out.
    return not any((piece + piece).any() for piece in (bits[at : at + step] for at in range(0, len(bits), step)))


class FiniteScan:
    """`check_finite` over a whole file read once from the start, in chunks of any size, beside hashing it.

    `nonzero`: the tensors that held any number but zero so far.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = sorted(tensors.items(), key=lambda item: item[1].begin)
        self._next = 0
        self._offset = 0
        self._partial = b""  # the first bytes of an element that the last chunk cut
        self.nonzero: set[str] = set()

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """The next bytes of the file. Raises AdapterInvalid as `check_finite`."""
        view = memoryview(chunk).cast("B")
        start, end = self._offset, self._offset + len(view)
        self._offset = end
        while self._next < len(self._tensors):
            name, info = self._tensors[self._next]
            if info.begin >= end:
                return
            self._check(name, info.dtype, view[max(info.begin - start, 0) : info.end - start])
            if info.end > end:
                return
            self._next += 1

    def _check(self, name: str, dtype: str, part: memoryview) -> None:
        item = ITEM_SIZES[dtype]
        if self._partial:
            head = -len(self._partial) % item
            joined = self._partial + part[:head]
            if len(joined) < item:
                self._partial = joined
                return
            self._check_whole(name, dtype, joined)
            part = part[head:]
        whole = len(part) // item * item
        self._check_whole(name, dtype, part[:whole])
        self._partial = bytes(part[whole:])

    def _check_whole(self, name: str, dtype: str, data: bytes | memoryview) -> None:
        check_finite(name, dtype, data)
        if name not in self.nonzero and not is_all_zero(dtype, data):
            self.nonzero.add(name)
