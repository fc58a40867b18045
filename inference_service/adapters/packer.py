"""Adapter files → one blob as it lies on the device: one chunk per layer, every module at its true rank.

    chunk   for each of qkv, o, gate_up, down: the A [rank, in] of its modules, then their B, rank-major [rank, out];
            then the layer's extras (extras.py)
    blob    the chunk of what lies outside the layers, then those of the layers that the adapter changes, in order

The weights are read once, front to back, and hashed on the way: nothing counts before the hash is right. While one
thread reads and hashes, which takes longest, others lay out what it has read.
"""

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.conversion import STORAGE
from inference_service.adapters.dora import GainCache
from inference_service.adapters.extras import Extras, extra_bytes, needs_base, plan_extras
from inference_service.adapters.places import BlocksPlace, MatrixPlace, Piece, Place
from inference_service.adapters.saved_rows import SavedRows, saved_rows
from inference_service.types import BlobLayout, ChunkLayout, ExtraLayout, ModuleLayout
from shared.adapter_format.binding import BindingPlan, ModuleBinding, plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.adapter_format.finite import check_finite
from shared.adapter_format.header import MAX_HEADER_BYTES, TensorInfo, read_header
from shared.adapter_format.served import check_served
from shared.base_model import ModelConfig, linear_shape
from shared.digest import FileEntry, manifest_digest
from shared.errors import DigestMismatch, LoraplexError, UnsupportedAdapter

GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # qkv, o, gate_up, down: modules that share their input
_ALIGNMENT = 16
_PIECE_BYTES = 1 << 20
_LARGEST_PIECE = 8 << 20  # of a tensor whose rows may be laid out apart
NO_ROWS = SavedRows()
_AHEAD = 4  # pieces read, and not laid out yet


class _Stored(NamedTuple):
    """Rows of a tensor in the file, from row `first` on: bytes `begin` up to `end`."""

    name: str
    dtype: str
    first: int
    begin: int
    end: int


def plan_layout(binding: BindingPlan, model: ModelConfig, dtype: str, rows: SavedRows = NO_ROWS) -> BlobLayout:
    """Where everything of `binding` goes in a blob of `dtype`; reads no data. `rows`: of embedding and head."""
    modules: defaultdict[int, list[ModuleBinding]] = defaultdict(list)
    for module in binding.modules:
        modules[module.layer].append(module)
    unplaced: defaultdict[int, list[ExtraLayout]] = defaultdict(list)
    for extra in plan_extras(binding, model, dtype, rows):
        unplaced[extra.layer].append(extra)
    chunks: list[ChunkLayout] = []
    extras: list[ExtraLayout] = []
    offset = 0
    for layer in sorted(modules.keys() | unplaced.keys()):
        chunk = _chunk(layer, offset, modules[layer], model, np.dtype(STORAGE[dtype]).itemsize)
        placed, offset = _placed(unplaced[layer], offset + chunk.nbytes, rows)
        chunks.append(chunk._replace(nbytes=offset - chunk.offset))
        extras += placed
    return BlobLayout(
        offset, binding.rank, dtype, tuple(chunks), tuple(extras), binding.extra_vocab, binding.activation
    )


def _placed(extras: list[ExtraLayout], end: int, rows: SavedRows) -> tuple[list[ExtraLayout], int]:
    """One behind the other from `end` on, and where they end. A head that sees the embedding's rows has no others."""
    placed: list[ExtraLayout] = []
    for extra in extras:
        if extra.name in ("head.ids", "head.rows") and rows.head is rows.embed:
            name = extra.name.replace("head", "embed")
            placed.append(extra._replace(offset=next(other.offset for other in placed if other.name == name)))
            continue
        placed.append(extra._replace(offset=end))
        end += _aligned(extra_bytes(extra))
    return placed, end


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
    _extras: Extras
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

    def fill(self, blob: memoryview, workers: Executor, on_read: Callable[[int], None] | None = None) -> None:
        """Write the blob, `layout.nbytes` bytes, padding included. Blocks; on an error `blob` holds anything.

        Args:
            blob: Where to.
            workers: Threads that lay out. The caller's is none of them: it waits for them.
            on_read: Told of bytes read, as they are.

        Raises:
            DigestMismatch: the weights are not what was registered, or cannot be read.
            AdapterInvalid: a number is NaN, infinite or beyond the range of the dtype (metadata `tensor`).
            BaseModelMismatch: the base model's weights are needed, and cannot be read.
        """
        hasher = hashlib.sha256(self._head)
        self._clear_padding(blob)
        runs, places = self._runs(), self._places()
        buffers = [bytearray(max(run[-1].end - run[0].begin for run in runs)) for _ in range(min(_AHEAD, len(runs)))]
        writing: deque[Future[None]] = deque()
        try:
            for index, run in enumerate(runs):
                if len(writing) == _AHEAD:
                    writing.popleft().result()  # which also frees its buffer
                data = memoryview(buffers[index % _AHEAD])[: run[-1].end - run[0].begin]
                _read_into(self._fd, data, run[0].begin, self._weights)
                writing.append(workers.submit(self._write, blob, places, run, data))
                hasher.update(data)
                if on_read is not None:
                    on_read(len(data))
            for written in writing:
                written.result()
        except LoraplexError:
            _check_hash(self._fd, self._weights)
            raise
        finally:
            wait(writing)
        if hasher.hexdigest() != self._weights.sha256:
            raise _damaged(self._weights)
        self._extras.finish(blob, workers)

    def _clear_padding(self, blob: memoryview) -> None:
        """Zero the bytes behind every tensor, up to the next."""
        item = np.dtype(STORAGE[self.layout.dtype]).itemsize
        ends = [extra.offset + extra_bytes(extra) for extra in self.layout.extras]
        for chunk in self.layout.chunks:
            for module in chunk.modules:
                for offset, size in zip(module[3:], reversed(linear_shape(self._model, module.module)), strict=True):
                    ends.append(chunk.offset + offset + module.rank * size * item)
        for end in ends:
            blob[end : _aligned(end)] = bytes(_aligned(end) - end)

    def _runs(self) -> list[list[_Stored]]:
        """The tensors in file order, in runs that are read at once."""
        runs: list[list[_Stored]] = []
        for name, info in self._tensors.items():
            for stored in self._parts(name, info):
                if not runs or stored.end - runs[-1][0].begin > _PIECE_BYTES:
                    runs.append([])
                runs[-1].append(stored)
        return runs

    def _parts(self, name: str, info: TensorInfo) -> Iterator[_Stored]:
        """One for a tensor of usual size; of larger ones, as whole embeddings are, some rows each."""
        size = info.end - info.begin
        if size <= _LARGEST_PIECE or len(info.shape) != 2 or name in self._in_blocks:
            yield _Stored(name, info.dtype, 0, info.begin, info.end)
            return
        row_bytes = size // info.shape[0]
        step = max(_LARGEST_PIECE // row_bytes, 1)
        for first in range(0, info.shape[0], step):
            begin = info.begin + first * row_bytes
            yield _Stored(name, info.dtype, first, begin, min(begin + step * row_bytes, info.end))

    @property
    def _in_blocks(self) -> set[str]:
        return {name for each in self._binding.modules for name in (each.a, each.b) if each.blocks != (1, 1)}

    def _places(self) -> dict[str, list[Place]]:
        tensors = {(module.layer, module.module): module for module in self._binding.modules}
        places: defaultdict[str, list[Place]] = defaultdict(list)
        for chunk in self.layout.chunks:
            for layout in chunk.modules:
                names = tensors[chunk.layer, layout.module]
                out, columns = linear_shape(self._model, layout.module)
                a = MatrixPlace(chunk.offset + layout.a_offset, layout.rank, columns, is_b=False)
                b = MatrixPlace(chunk.offset + layout.b_offset, layout.rank, out, is_b=True)
                for name, place, num_blocks in zip((names.a, names.b), (a, b), names.blocks, strict=True):
                    places[name].append(place if num_blocks == 1 else BlocksPlace(place, num_blocks))
        for name, extra in self._extras.places():
            places[name].append(extra)
        return places

    def _write(self, blob: memoryview, places: dict[str, list[Place]], run: list[_Stored], data: memoryview) -> None:
        """Lay out the tensors of a run, whose bytes are `data`."""
        for name, dtype, first, begin, end in run:
            if name not in places:
                continue  # says nothing that is served: a buffer of training, or a copy of the base model's weights
            piece = Piece(name, dtype, first, data[begin - run[0].begin : end - run[0].begin])
            check_finite(name, dtype, piece.data)
            for place in places[name]:
                place.write(blob, self.layout.dtype, piece)


def open_adapter(
    folder: Path,
    files: Sequence[FileEntry],
    model: ModelConfig,
    dtype: str,
    base: BaseTensors | None = None,
    gains: GainCache | None = None,
) -> OpenAdapter:
    """Open an adapter of which `files` is the manifest, bind it to `model` and plan its blob. Blocks.

    Args:
        folder: Holds the files.
        files: What it holds.
        model: The base model.
        dtype: Of the blob: float32, float16 or bfloat16.
        base: The base model's weights, for adapters that count from them; None: there are none on disk.
        gains: Where what was computed of these is kept.

    Raises:
        DigestMismatch: a file is missing, cannot be read, or is not what was registered.
        AdapterInvalid, UnsupportedAdapter: the files are, and yet cannot be served on `model`.
        BaseModelMismatch: the base model's weights are needed, and cannot be read.
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
            check_served(binding)
            if needs_base(binding):
                _present(base)
            rows = saved_rows(
                binding, tensors, lambda view, offset: _read_into(fd, view, offset, weights), lambda: _present(base)
            )
        except LoraplexError:
            _check_hash(fd, weights)
            raise
        layout = plan_layout(binding, model, dtype, rows)
        extras = Extras(binding, model, layout, rows, base, gains, manifest_digest(files))
        return OpenAdapter(layout, model, binding, extras, tensors, head, weights, fd)
    except BaseException:
        os.close(fd)
        raise


def _present(base: BaseTensors | None) -> BaseTensors:
    if base is None:
        raise UnsupportedAdapter(
            "the adapter is packed against the base model's weights, and there are none here: the replica runs on "
            "random ones, or this is a part of a blend",
            metadata={"key": "load_format"},
        )
    return base


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
