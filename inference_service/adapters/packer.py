"""Adapter files → one blob as it lies on the device: one chunk per layer, every module at its true rank.

    chunk   for each of qkv, o, gate_up, down: the A [rank, in] of its modules, then their B, rank-major [rank, out]
    blob    the chunks of the layers that have modules, in order

The weights are read once, front to back, and hashed on the way: nothing counts before the hash is right.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from inference_service.adapters.conversion import STORAGE, convert
from inference_service.types import BlobLayout, ChunkLayout, ModuleLayout
from shared.adapter_format.binding import BindingPlan, ModuleBinding, plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.adapter_format.finite import check_finite
from shared.adapter_format.header import MAX_HEADER_BYTES, TensorInfo, read_header
from shared.base_model import ModelConfig, linear_shape
from shared.digest import FileEntry
from shared.errors import DigestMismatch, LoraplexError

GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # qkv, o, gate_up, down: modules that share their input
_ALIGNMENT = 16
_PIECE_BYTES = 1 << 20


class _Place(NamedTuple):
    """Where a tensor goes in the blob, as [rank, columns]; a B, [columns, rank] in the file, is transposed."""

    offset: int
    rank: int
    columns: int
    is_b: bool


def plan_layout(binding: BindingPlan, model: ModelConfig, dtype: str) -> BlobLayout:
    """Where every module of `binding` goes in a blob of `dtype`; reads no data."""
    chunks: list[ChunkLayout] = []
    offset = 0
    for layer, modules in groupby(binding.modules, key=lambda module: module.layer):
        chunk = _chunk(layer, offset, list(modules), model, np.dtype(STORAGE[dtype]).itemsize)
        chunks.append(chunk)
        offset += chunk.nbytes
    return BlobLayout(nbytes=offset, rank=binding.rank, dtype=dtype, chunks=tuple(chunks))


def _chunk(layer: int, offset: int, modules: list[ModuleBinding], model: ModelConfig, item: int) -> ChunkLayout:
    by_index = {module.module: module for module in modules}
    layouts: list[ModuleLayout] = []
    end = 0
    for group in GROUPS:
        present = [by_index[index] for index in group if index in by_index]
        a_offsets: list[int] = []
        b_offsets: list[int] = []
        for offsets, dimension in ((a_offsets, 1), (b_offsets, 0)):
            for module in present:
                offsets.append(end)
                end += _aligned(module.rank * linear_shape(model, module.module)[dimension] * item)
        for module, a, b in zip(present, a_offsets, b_offsets, strict=True):
            layouts.append(ModuleLayout(module.module, module.rank, module.scale, a, b))
    return ChunkLayout(layer, offset, end, tuple(layouts))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class OpenAdapter:
    """The files of one adapter, ready to be packed: `layout` says how much room a blob needs. Close it after use."""

    layout: BlobLayout
    _model: ModelConfig
    _binding: BindingPlan
    _tensors: dict[str, TensorInfo]
    _head: bytes
    _weights: FileEntry
    _fd: int

    def __enter__(self) -> "OpenAdapter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def fill(self, blob: memoryview) -> None:
        """Write the blob, `layout.nbytes` bytes, padding included. Blocks; on an error `blob` holds anything.

        Raises:
            DigestMismatch: the weights are not what was registered, or cannot be read.
            AdapterInvalid: a number is NaN, infinite or beyond the range of the dtype (metadata `tensor`).
        """
        hasher = hashlib.sha256(self._head)
        buffer = bytearray(max(info.end - info.begin for info in self._tensors.values()))
        places = self._places()
        try:
            for name, info in self._tensors.items():
                data = memoryview(buffer)[: info.end - info.begin]
                _read_into(self._fd, data, info.begin, self._weights)
                hasher.update(data)
                check_finite(name, info.dtype, data)
                self._write(blob, places[name], name, info.dtype, data)
        except LoraplexError:
            _check_hash(self._fd, self._weights)
            raise
        if hasher.hexdigest() != self._weights.sha256:
            raise _damaged(self._weights)

    def _places(self) -> dict[str, _Place]:
        tensors = {(module.layer, module.module): module for module in self._binding.modules}
        places = {}
        for chunk in self.layout.chunks:
            for layout in chunk.modules:
                names = tensors[chunk.layer, layout.module]
                out, columns = linear_shape(self._model, layout.module)
                places[names.a] = _Place(chunk.offset + layout.a_offset, layout.rank, columns, is_b=False)
                places[names.b] = _Place(chunk.offset + layout.b_offset, layout.rank, out, is_b=True)
        return places

    def _write(self, blob: memoryview, place: _Place, tensor: str, source: str, data: memoryview) -> None:
        numbers = convert(tensor, data, source, self.layout.dtype)
        target = np.frombuffer(blob, numbers.dtype, count=numbers.size, offset=place.offset)
        if place.is_b:
            target.reshape(place.rank, place.columns)[:] = numbers.reshape(place.columns, place.rank).T
        else:
            target[:] = numbers
        end = place.offset + target.nbytes
        blob[end : _aligned(end)] = bytes(_aligned(end) - end)


def open_adapter(folder: Path, files: Sequence[FileEntry], model: ModelConfig, dtype: str) -> OpenAdapter:
    """Open an adapter of which `files` is the manifest, bind it to `model` and plan its blob. Blocks.

    Raises:
        DigestMismatch: a file is missing, cannot be read, or is not what was registered.
        AdapterInvalid, UnsupportedAdapter: the files are, and yet cannot be served on `model`.
    """
    entries = {entry.path: entry for entry in files}
    config = parse_adapter_config(_read_config(folder / CONFIG, entries[CONFIG]))
    weights = entries[WEIGHTS]
    fd = _open(folder / WEIGHTS, weights)
    try:
        head = _read_head(fd, weights)
        try:
            tensors = read_header(lambda offset, length: head[offset : offset + length], weights.size)
            binding = plan(config, tensors, model)
        except LoraplexError:
            _check_hash(fd, weights)
            raise
        return OpenAdapter(plan_layout(binding, model, dtype), model, binding, tensors, head, weights, fd)
    except BaseException:
        os.close(fd)
        raise


def _open(path: Path, entry: FileEntry) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _damaged(entry, error.strerror) from None
    if (size := os.fstat(fd).st_size) != entry.size:
        os.close(fd)
        raise _damaged(entry, f"has {size} bytes instead of {entry.size}")
    return fd


def _read_config(path: Path, entry: FileEntry) -> bytes:
    fd = _open(path, entry)
    try:
        raw = bytearray(entry.size)
        _read_into(fd, memoryview(raw), 0, entry)
    finally:
        os.close(fd)
    if hashlib.sha256(raw).hexdigest() != entry.sha256:
        raise _damaged(entry)
    return bytes(raw)


def _read_head(fd: int, entry: FileEntry) -> bytes:
    """The bytes before the first tensor, as far as there are such."""
    prefix = bytearray(min(8, entry.size))
    _read_into(fd, memoryview(prefix), 0, entry)
    length = min(8 + int.from_bytes(prefix, "little"), 8 + MAX_HEADER_BYTES, entry.size)
    head = bytearray(length)
    _read_into(fd, memoryview(head), 0, entry)
    return bytes(head)


def _read_into(fd: int, view: memoryview, offset: int, entry: FileEntry) -> None:
    """Fill `view` from `offset` on. Never a mapping: a file that is cut short must be an error, not a SIGBUS."""
    while view:
        try:
            count = os.preadv(fd, [view], offset)
        except OSError as error:
            raise _damaged(entry, error.strerror) from None
        if not count:
            raise _damaged(entry, "was cut short while it was read")
        view, offset = view[count:], offset + count


def _check_hash(fd: int, entry: FileEntry) -> None:
    """Something is wrong with what was read: is it what was registered?"""
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for offset in range(0, entry.size, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, entry.size - offset)]
        _read_into(fd, piece, offset, entry)
        hasher.update(piece)
    if hasher.hexdigest() != entry.sha256:
        raise _damaged(entry)


def _damaged(entry: FileEntry, problem: str | None = "is not what was registered") -> DigestMismatch:
    return DigestMismatch(f"{entry.path} in the cache {problem}", metadata={"file": entry.path, "sha256": entry.sha256})
