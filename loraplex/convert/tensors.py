"""Tensors of safetensors files as numpy arrays: read one at a time by their ranges, written as float32."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.adapter_format.floats import FLOATS, to_float32
from shared.adapter_format.header import TensorInfo
from shared.adapter_format.reasons import tensor_unsupported


def read_tensor(path: Path, name: str, info: TensorInfo) -> NDArray[np.float32]:
    """The tensor `name`, which lies at `info` in the file at `path`, as float32.

    Raises:
        UnsupportedAdapter: another dtype (metadata `tensor`).
        OSError: the file cannot be read, or ends too early.
    """
    if info.dtype not in FLOATS:
        raise tensor_unsupported(name, "dtype", f"{info.dtype} cannot be converted; save it as float32")
    return to_float32(info.dtype, _read(path, info.begin, info.end - info.begin)).reshape(info.shape)


def _read(path: Path, begin: int, nbytes: int) -> bytearray:
    buffer = bytearray(nbytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < nbytes:
            count = os.preadv(descriptor, [memoryview(buffer)[done:]], begin + done)
            if not count:
                raise OSError(f"{path.name} has become shorter")
            done += count
    finally:
        os.close(descriptor)
    return buffer


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterable[NDArray[np.float32]]) -> None:
    """Writes a safetensors file as PEFT does.

    Args:
        path: Where to; it must not exist.
        shapes: Name and shape of every tensor, in the order of `arrays`.
        arrays: The data, taken one at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape, array in zip(shapes.values(), arrays, strict=True):
            file.write(np.ascontiguousarray(array.reshape(shape), dtype="<f4").data)
