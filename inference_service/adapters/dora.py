"""DoRA's gains: magnitude / ‖W + scale · BA‖, per output row of a linear or per dimension of an embedding.

The norm is a constant of adapter and base model. It is taken without forming BA:
‖W + sBA‖² = ‖W‖² + 2s Σ (W Aᵀ) ⊙ B + s² Σ (B (A Aᵀ)) ⊙ B, in float64, over W in pieces.
"""

import hashlib
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PIECE_NUMBERS = 1 << 20

Float64s = NDArray[np.float64]
Weights = Callable[[int, int], Float64s]  # rows from, up to → [rows, columns]


def linear_norms(weights: Weights, a: Float64s, b: Float64s, scale: float) -> Float64s:
    """‖W + scale · BA‖ of every output row, `[out]`.

    Args:
        weights: Rows of W `[out, in]`.
        a: `[rank, in]`.
        b: `[rank, out]`.
        scale: Of BA.
    """
    (_, columns), out = a.shape, b.shape[1]
    gram = a @ a.T
    squares = np.empty(out)
    step = max(_PIECE_NUMBERS // columns, 1)
    for begin in range(0, out, step):
        part = b[:, begin : begin + step]
        w = weights(begin, begin + part.shape[1])
        mixed = ((w @ a.T) * part.T).sum(axis=1)
        own = (part * (gram @ part)).sum(axis=0)
        squares[begin : begin + step] = np.einsum("ij,ij->i", w, w) + 2 * scale * mixed + scale**2 * own
    return np.sqrt(np.maximum(squares, 0.0))


def embedding_norms(weights: Weights, a: Float64s, b: Float64s, scale: float) -> Float64s:
    """‖E + scale · A B‖ of every column, over the vocabulary, `[hidden]`.

    Args:
        weights: Rows of E `[vocab, hidden]`.
        a: `[vocab, rank]`.
        b: `[rank, hidden]`.
        scale: Of AB.
    """
    squares, mixed = np.zeros(b.shape[1]), np.zeros(b.shape)
    step = max(_PIECE_NUMBERS // b.shape[1], 1)
    for begin in range(0, a.shape[0], step):
        part = a[begin : begin + step]
        e = weights(begin, begin + part.shape[0])
        squares += np.einsum("ij,ij->j", e, e)
        mixed += part.T @ e
    squares += 2 * scale * (mixed * b).sum(axis=0) + scale**2 * (b * ((a.T @ a) @ b)).sum(axis=0)
    return np.sqrt(np.maximum(squares, 0.0))


class GainCache:
    """Gains on disk, one file for each adapter, base model and dtype. What does not fit in `budget` bytes goes, that
    which was used the longest ago first. A file that is not what was written counts as absent; errors of the disk only
    cost the computing. Several processes may share the folder."""

    def __init__(self, folder: Path, budget: int = 1 << 30) -> None:
        self._folder = folder
        self._budget = budget

    def find(self, digest: str, fingerprint: str, dtype: str, count: int) -> NDArray[np.float32] | None:
        """`count` gains as `keep` was given them, or None."""
        path = self._path(digest, fingerprint, dtype)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        if len(data) != 32 + 4 * count or hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        return np.frombuffer(data, np.float32, offset=32)

    def keep(self, digest: str, fingerprint: str, dtype: str, gains: NDArray[np.float32]) -> None:
        """Write them, whole or not at all."""
        data = gains.tobytes()
        temporary = self._folder / f"{uuid.uuid4().hex}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
            temporary.rename(self._path(digest, fingerprint, dtype))
            self._trim()
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _path(self, digest: str, fingerprint: str, dtype: str) -> Path:
        key = hashlib.sha256(f"{digest} {fingerprint} {dtype}".encode()).hexdigest()
        return self._folder / f"{key}.gains"

    def _trim(self) -> None:
        found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self._folder))
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= self._budget:
                return
            Path(path).unlink(missing_ok=True)
            total -= size
