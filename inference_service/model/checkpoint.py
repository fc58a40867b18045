"""Reads the tensors of safetensors files into memory that is already there, several pieces at a time.

Files are read with preadv into staging buffers that are used again and again; they are never mapped, since who can
truncate a mapped file can kill its reader. For a GPU the buffers are page-locked: the copy of one piece runs while the
next is read, and conversion to another dtype happens on the device.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shared.adapter_format.header import TensorInfo
from shared.errors import BaseModelMismatch

PIECE_BYTES = 8 << 20
NUM_READERS = 8
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Source(NamedTuple):
    """A tensor in a file and where it goes: `place` is contiguous, of the tensor's shape."""

    file: Path
    info: TensorInfo
    place: Tensor


class _Piece(NamedTuple):
    """Bytes [begin, begin + nbytes) of an open file, and the elements of a parameter that they are."""

    descriptor: int
    name: str
    begin: int
    nbytes: int
    dtype: torch.dtype
    target: Tensor  # flat


def read_tensors(sources: Sequence[Source], num_readers: int = NUM_READERS, piece_bytes: int = PIECE_BYTES) -> None:
    """Fill every source's place, all on one device. Returns when all is there.

    Raises:
        BaseModelMismatch: a file cannot be read or has become shorter (metadata `file`).
    """
    if not sources:
        return
    device = sources[0].place.device
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for file in dict.fromkeys(source.file for source in sources):
            descriptors[file] = _open(file)
            stack.callback(os.close, descriptors[file])
        pieces = [
            piece
            for source in sorted(sources, key=lambda source: (source.file, source.info.begin))
            for piece in _pieces(descriptors[source.file], source, piece_bytes)
        ]
        threads = stack.enter_context(ThreadPoolExecutor(num_readers, "read-weights"))
        shares = (pieces[number::num_readers] for number in range(num_readers))
        list(threads.map(lambda share: _Reader(device, piece_bytes).run(share), shares))


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(file.name, error.strerror) from error


def unreadable(file: str, reason: str | None) -> BaseModelMismatch:
    """The error of a weights file that cannot be read."""
    return BaseModelMismatch(f"{file} cannot be read: {reason}", metadata={"file": file})


def _pieces(descriptor: int, source: Source, piece_bytes: int) -> Iterator[_Piece]:
    dtype = DTYPES[source.info.dtype]
    begin = source.info.begin
    for target in source.place.view(-1).split(piece_bytes // dtype.itemsize):
        nbytes = target.numel() * dtype.itemsize
        yield _Piece(descriptor, source.file.name, begin, nbytes, dtype, target)
        begin += nbytes


class _Reader:
    """One thread's staging buffers, which take turns, and its stream."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        num_buffers = 2 if self._is_cuda else 1
        self._staging = [
            torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(num_buffers)
        ]
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self._copied = [torch.cuda.Event() for _ in range(num_buffers)]

    @torch.inference_mode()
    def run(self, pieces: Sequence[_Piece]) -> None:
        """Read all of them; returns when they have arrived."""
        for number, piece in enumerate(pieces):
            turn = number % len(self._staging)
            staging = self._staging[turn][: piece.nbytes]
            if self._is_cuda:
                self._copied[turn].synchronize()
            _read(piece, staging.numpy().data)
            self._place(piece, staging.view(piece.dtype), turn)
        if self._is_cuda:
            self._stream.synchronize()

    def _place(self, piece: _Piece, stored: Tensor, turn: int) -> None:
        if not self._is_cuda:
            piece.target.copy_(stored)
            return
        with torch.cuda.stream(self._stream):
            if piece.dtype == piece.target.dtype:
                piece.target.copy_(stored, non_blocking=True)
            else:
                piece.target.copy_(stored.to(self._device, non_blocking=True))
            self._copied[turn].record()


def _read(piece: _Piece, buffer: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        try:
            count = os.preadv(piece.descriptor, [buffer[done:]], piece.begin + done)
        except OSError as error:
            raise unreadable(piece.name, error.strerror) from error
        if not count:
            raise unreadable(piece.name, "it has become shorter")
        done += count
