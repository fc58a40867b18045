"""The header of a safetensors file: 8 bytes of little-endian length, that many bytes of JSON, then the data."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared.adapter_format.mistaken import mistaken
from shared.adapter_format.reasons import COPY_AGAIN, file_invalid, tensor_invalid
from shared.adapter_format.strict_json import parse_object
from shared.json_text import as_json

MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 40

# Bytes per element of the dtypes that safetensors files may hold.
ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """One tensor: dtype as safetensors names it (`BF16`), shape, and its bytes [begin, end) from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(
    read: Callable[[int, int], bytes], size: int, file: str = "adapter_model.safetensors"
) -> dict[str, TensorInfo]:
    """Read and check the header of a safetensors file.

    Args:
        read: `read(offset, length)` gives that range of the file, shorter where the file ends.
        size: Length of the file in bytes.
        file: Name for error messages.

    Returns:
        Every tensor by name, in the order of the data.

    Raises:
        AdapterInvalid: the file is truncated, the header is malformed, or the tensors do not fill the data exactly
            (metadata `file` or `tensor`).
    """
    prefix = read(0, 8)
    if size < 8 or len(prefix) < 8:
        raise file_invalid(file, f"is truncated: {size} bytes", COPY_AGAIN)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise mistaken(prefix, file) or file_invalid(
            file, f"has a header of {length} bytes; the limit is {MAX_HEADER_BYTES}", COPY_AGAIN
        )
    header = read(8, length) if 8 + length <= size else b""
    if not header.startswith(b"{") and (wrong := mistaken(prefix, file)):
        raise wrong
    if len(header) < length:
        raise file_invalid(file, f"is truncated: {size} bytes with a header of {length}", COPY_AGAIN)
    entries = parse_object(header, file)
    if not isinstance(entries.pop("__metadata__", {}), dict):
        raise file_invalid(file, "__metadata__ is not an object", COPY_AGAIN)
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in entries.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(ordered, 8 + length, size, file)
    return ordered


def read_header_of(path: Path) -> dict[str, TensorInfo]:
    """The header of the safetensors file at `path`. Raises as `read_header`, and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return read_header(lambda offset, length: os.pread(descriptor, length, offset), size, path.name)
    finally:
        os.close(descriptor)


def _tensor(name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise tensor_invalid(name, "its header entry must have dtype, shape and data_offsets", COPY_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise tensor_invalid(name, f"dtype {as_json(dtype):.40} is not known", "save it as float32")
    if not _is_ints(shape, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        problem = f"shape {as_json(shape):.80} is not a list of at most {MAX_DIMENSIONS} sizes"
        raise tensor_invalid(name, problem, COPY_AGAIN)
    if not _is_ints(offsets, 1 << 62) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise tensor_invalid(name, f"data_offsets {as_json(offsets):.80} is not [begin, end]", COPY_AGAIN)
    expected = ITEM_SIZES[dtype]
    for dimension in shape:
        expected *= dimension
    if offsets[1] - offsets[0] != expected:
        raise tensor_invalid(name, f"has {offsets[1] - offsets[0]} bytes; {dtype} {shape} takes {expected}", COPY_AGAIN)
    return TensorInfo(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_ints(value: Any, limit: int) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= limit for item in value)


def _check_layout(ordered: Mapping[str, TensorInfo], data_start: int, size: int, file: str) -> None:
    end = data_start
    for name, tensor in ordered.items():
        if tensor.begin != end:
            problem = "overlaps the tensor before it" if tensor.begin < end else "leaves a hole before it"
            raise tensor_invalid(name, f"{problem} in the file", COPY_AGAIN)
        if tensor.end > size:
            raise tensor_invalid(
                name, f"the file is truncated: it ends at byte {size}, the tensor at {tensor.end}", COPY_AGAIN
            )
        end = tensor.end
    if end != size:
        raise file_invalid(file, f"has {size - end} bytes after the last tensor", COPY_AGAIN)
