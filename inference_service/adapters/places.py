"""Where the tensors of an adapter's file go: into its blob, converted on the way, or aside for later."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_service.adapters.conversion import FILE_NAMES, STORAGE, convert, widened
from inference_service.adapters.saved_rows import RowsPart


class Piece(NamedTuple):
    """Whole rows of a tensor, from row `first` on: its name, its dtype (F32, F16 or BF16), and the bytes."""

    tensor: str
    dtype: str
    data: memoryview
    first: int


class Place(Protocol):
    """Takes a tensor in pieces, from several threads. `dtype`: of the blob."""

    def write(self, blob: memoryview, dtype: str, piece: Piece) -> None: ...


class MatrixPlace(NamedTuple):
    """In the blob from byte `offset` on, as `[rank, columns]`; a B, `[columns, rank]` in the file, is transposed."""

    offset: int
    rank: int
    columns: int
    is_b: bool

    def write(self, blob: memoryview, dtype: str, piece: Piece) -> None:
        rows = _in_file_order(self, blob, dtype)
        count = len(piece.data) // (rows.shape[1] * STORAGE[FILE_NAMES[piece.dtype]]().itemsize)
        convert(piece.tensor, piece.data, piece.dtype, dtype, rows[piece.first : piece.first + count])


class BlocksPlace(NamedTuple):
    """As `MatrixPlace`, of a matrix of `num_blocks` blocks on its diagonal, which the file holds stacked.

    It is taken in one piece.
    """

    matrix: MatrixPlace
    num_blocks: int

    def write(self, blob: memoryview, dtype: str, piece: Piece) -> None:
        rows = _in_file_order(self.matrix, blob, dtype)
        height, width = (size // self.num_blocks for size in rows.shape)
        stacked = np.empty((rows.shape[0], width), STORAGE[dtype])
        convert(piece.tensor, piece.data, piece.dtype, dtype, stacked)
        rows[:] = 0
        for block in range(self.num_blocks):
            span = slice(block * height, (block + 1) * height)
            rows[span, block * width : (block + 1) * width] = stacked[span]


class RowsPlace(NamedTuple):
    """Some rows of the tensor, in the blob from byte `offset` on, as `[num_rows, columns]`."""

    offset: int
    num_rows: int
    columns: int
    part: RowsPart

    def write(self, blob: memoryview, dtype: str, piece: Piece) -> None:
        source = np.frombuffer(piece.data, STORAGE[FILE_NAMES[piece.dtype]]).reshape(-1, self.columns)
        span = slice(*np.searchsorted(self.part.sources, (piece.first, piece.first + len(source))))
        chosen = source[self.part.sources[span] - piece.first]
        if not chosen.size:
            return
        rows = np.empty(chosen.shape, STORAGE[dtype])
        convert(piece.tensor, chosen.data, piece.dtype, dtype, rows)
        target = np.frombuffer(blob, STORAGE[dtype], count=self.num_rows * self.columns, offset=self.offset)
        target.reshape(self.num_rows, self.columns)[self.part.targets[span]] = rows


class VectorPlace(NamedTuple):
    """Aside, as float32, under the tensor's name in `held`. It is taken in one piece."""

    held: dict[str, NDArray[np.float32]]

    def write(self, blob: memoryview, dtype: str, piece: Piece) -> None:
        stored = FILE_NAMES[piece.dtype]
        self.held[piece.tensor] = widened(np.frombuffer(piece.data, STORAGE[stored]), stored).copy()


def _in_file_order(place: MatrixPlace, blob: memoryview, dtype: str) -> NDArray[Any]:
    target: NDArray[Any] = np.frombuffer(blob, STORAGE[dtype], count=place.rank * place.columns, offset=place.offset)
    rows = target.reshape(place.rank, place.columns)
    return rows.T if place.is_b else rows
