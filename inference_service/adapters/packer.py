"""Adapter files → one blob as it lies on the device (layout.py).

The weights are read once, front to back, and hashed on the way, unless they have just been: nothing counts before the
hash is right. While one thread reads and hashes, which takes longest, others lay out what it has read. Of the file no
more is in memory than _AHEAD runs of tensors: _PIECE_BYTES each, or one tensor; of 8 MiB, or as large as an MoE's.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.cached_file import CachedFile, read_verified
from inference_service.adapters.conversion import STORAGE, widened_file
from inference_service.adapters.dora import GainCache
from inference_service.adapters.extras import Extras, extra_bytes, needs_base
from inference_service.adapters.layout import aligned, plan_layout
from inference_service.adapters.places import BlocksPlace, MatrixPlace, Piece, Place
from inference_service.adapters.saved_rows import saved_rows
from inference_service.types import BlobLayout
from shared.adapter_format.binding import plan
from shared.adapter_format.bound import BindingPlan, HeadBinding, ModuleBinding
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.adapter_format.finite import check_finite
from shared.adapter_format.header import TensorInfo, read_header
from shared.adapter_format.served import check_served
from shared.base_model import ModelConfig, linear_shape
from shared.digest import FileEntry, manifest_digest
from shared.errors import LoraplexError, UnsupportedAdapter

_PIECE_BYTES = 1 << 20
_LARGEST_PIECE = 8 << 20  # of a tensor whose rows may be laid out apart
_AHEAD = 4  # pieces read, and not laid out yet


class _Stored(NamedTuple):
    """Rows of a tensor in the file, from row `first` on: bytes `begin` up to `end`."""

    name: str
    dtype: str
    first: int
    begin: int
    end: int


@dataclass
class OpenAdapter:
    """The files of one adapter, ready to be packed: `layout` says how much room a blob needs. Close it after use."""

    layout: BlobLayout
    _model: ModelConfig
    _binding: BindingPlan
    _extras: Extras
    _tensors: dict[str, TensorInfo]
    _head: bytes
    _weights: CachedFile

    def __enter__(self) -> "OpenAdapter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._weights.close()

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
        hasher = None if self._weights.is_verified else hashlib.sha256(self._head)
        self._clear_padding(blob)
        runs, places = self._runs(), self._places()
        buffers = [bytearray(max(run[-1].end - run[0].begin for run in runs)) for _ in range(min(_AHEAD, len(runs)))]
        writing: deque[Future[None]] = deque()
        try:
            for index, run in enumerate(runs):
                if len(writing) == _AHEAD:
                    writing.popleft().result()  # which also frees its buffer
                data = memoryview(buffers[index % _AHEAD])[: run[-1].end - run[0].begin]
                self._weights.read_into(data, run[0].begin)
                writing.append(workers.submit(self._write, blob, places, run, data))
                if hasher is not None:
                    hasher.update(data)
                if on_read is not None:
                    on_read(len(data))
            for written in writing:
                written.result()
        except LoraplexError:
            self._weights.check_hash()
            raise
        finally:
            wait(writing)
        if hasher is not None:
            self._weights.compare(hasher.hexdigest())
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
            blob[end : aligned(end)] = bytes(aligned(end) - end)

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
        head = self._binding.head
        pairs: list[ModuleBinding | HeadBinding] = [*self._binding.modules, *([head] if head else [])]
        return {name for each in pairs if each.blocks != (1, 1) for name in (each.a, each.b) if name is not None}

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
            part = data[begin - run[0].begin : end - run[0].begin]
            check_finite(name, dtype, part)
            piece = Piece(name, *widened_file(dtype, part), first)
            for place in places[name]:
                place.write(blob, self.layout.dtype, piece)


def open_adapter(
    folder: Path,
    files: Sequence[FileEntry],
    model: ModelConfig,
    dtype: str,
    base: BaseTensors | None = None,
    gains: GainCache | None = None,
    *,
    is_verified: bool = False,
    check: Callable[[BindingPlan], None] = check_served,
) -> OpenAdapter:
    """Open an adapter of which `files` is the manifest, bind it to `model` and plan its blob. Blocks.

    Args:
        folder: Holds the files.
        files: What it holds.
        model: The base model.
        dtype: Of the blob: float32, float16 or bfloat16.
        base: The base model's weights, for adapters that count from them; None: there are none on disk.
        gains: Where what was computed of these is kept.
        is_verified: The weights were hashed as they were written, a moment ago, and are not hashed again.
        check: Raises for a kind of adapter that is not wanted.

    Raises:
        DigestMismatch: a file is missing, cannot be read, or is not what was registered.
        AdapterInvalid, UnsupportedAdapter: the files are, and yet cannot be served on `model`.
        BaseModelMismatch: the base model's weights are needed, and cannot be read.
    """
    entries = {entry.path: entry for entry in files}
    config = parse_adapter_config(read_verified(folder / CONFIG, entries[CONFIG]))
    weights = CachedFile(folder / WEIGHTS, entries[WEIGHTS], is_verified=is_verified)
    try:
        head = weights.read_head()
        try:
            tensors = read_header(lambda offset, length: head[offset : offset + length], weights.entry.size)
            binding = plan(config, tensors, model)
            check(binding)
            if needs_base(binding):
                _present(base)
            rows = saved_rows(binding, tensors, weights.read_into, lambda: _present(base))
        except LoraplexError:
            weights.check_hash()
            raise
        layout = plan_layout(binding, model, dtype, rows)
        extras = Extras(binding, model, layout, rows, base, gains, manifest_digest(files))
        return OpenAdapter(layout, model, binding, extras, tensors, head, weights)
    except BaseException:
        weights.close()
        raise


def _present(base: BaseTensors | None) -> BaseTensors:
    if base is None:
        raise UnsupportedAdapter(
            "the adapter is packed against the base model's weights, and there are none here: the replica runs on "
            "random ones",
            metadata={"key": "load_format"},
        )
    return base
