"""The base model's weights on disk, in ranges: what an adapter is packed against. Nothing is mapped or kept."""

import os
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_service.adapters.conversion import FILE_NAMES, STORAGE, convert, widened
from shared.adapter_format.header import TensorInfo, read_header_of
from shared.base_model import ModelConfig, module_path, tensor_shapes
from shared.base_weights import checkpoint_files
from shared.errors import AdapterInvalid, BaseModelMismatch, InvalidArgument

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class _Stored(NamedTuple):
    """A tensor of the checkpoint and the file that holds it."""

    path: Path
    info: TensorInfo


class BaseTensors:
    """The checkpoint in `folder`, as it is served in `dtype`. Safe to use from several threads.

    Args:
        folder: With safetensors files.
        model: What config.json says of it.
        dtype: float32, float16 or bfloat16.
        fingerprint: Of the weights; "" if it is not known.
    """

    def __init__(self, folder: Path, model: ModelConfig, dtype: str, fingerprint: str = "") -> None:
        self.dtype = dtype
        self.fingerprint = fingerprint
        self._folder = folder
        self._model = model
        self._shapes = tensor_shapes(model)
        self._lock = Lock()
        self._stored: dict[str, _Stored] | None = None

    @property
    def head(self) -> str:
        """Name of the output layer's weight."""
        return EMBED if self._model.tie_word_embeddings else HEAD

    def num_rows(self, name: str) -> int:
        """Of a matrix, by config.json."""
        return self._shapes[name][0]

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Rows `begin` up to `end` of a matrix, `[rows, columns]` as `conversion.STORAGE` of the served dtype has them.

        Raises:
            BaseModelMismatch: the checkpoint lacks the tensor, or cannot be read (metadata `tensor` or `file`).
        """
        path, info = self._find(name)
        if info.dtype not in FILE_NAMES:
            raise BaseModelMismatch(f"the base model's {name} is {info.dtype}", metadata={"tensor": name})
        row_bytes = (info.end - info.begin) // info.shape[0]
        data = _read(path, info.begin + begin * row_bytes, (end - begin) * row_bytes)
        out = np.empty((end - begin, *info.shape[1:]), STORAGE[self.dtype])
        try:
            convert(name, memoryview(data), info.dtype, self.dtype, out.reshape(end - begin, -1))
        except AdapterInvalid as error:  # which speaks of adapters as a rule
            raise BaseModelMismatch(error.message, metadata={"tensor": name}) from None
        return out

    def matrix(self, name: str, begin: int, end: int) -> NDArray[np.float64]:
        """As `rows`, but as float64."""
        return widened(self.rows(name, begin, end), self.dtype).astype(np.float64)

    def bias(self, layer: int, module: int) -> NDArray[np.float64] | None:
        """Of a linear, `[out]`; None where it has none."""
        name = f"{module_path(layer, module)}.bias"
        return self.matrix(name, 0, self._shapes[name][0]) if name in self._shapes else None

    def _find(self, name: str) -> _Stored:
        with self._lock:
            if self._stored is None:
                self._stored = self._index()
        found = self._stored.get(name)
        if found is None or found.info.shape != self._shapes[name]:
            raise BaseModelMismatch(
                f"the base model's checkpoint has no tensor {name} of the shape that config.json says",
                metadata={"tensor": name},
            )
        return found

    def _index(self) -> dict[str, _Stored]:
        try:
            files = checkpoint_files(self._folder)
            return {name: _Stored(path, info) for path in files for name, info in read_header_of(path).items()}
        except (InvalidArgument, AdapterInvalid, OSError) as error:
            raise BaseModelMismatch(
                f"the adapter needs the base model's weights, which cannot be read: {error}",
                metadata={"file": self._folder.name},
            ) from None


def _read(path: Path, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise BaseModelMismatch(f"{path.name} was cut short", metadata={"file": path.name})
            view, offset = view[count:], offset + count
    finally:
        os.close(descriptor)
    return data
