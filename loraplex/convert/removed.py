"""What PiSSA, OLoRA and KaSA take out of a base weight W [out, in] before training, as factors of rank r.

Each is W projected on r directions, so it needs these directions only, no full decomposition. They are computed in
float64; the product of the factors does not depend on their signs. With the scale s of the adapter:

    PiSSA   W V Vᵀ of the right singular vectors of the r greatest singular values
    KaSA    W V Vᵀ of those of the r smallest
    OLoRA   s · Q Qᵀ W of the first r columns of Q in W = QR, which span the first r columns of W
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_FLOAT32_EPS = float(np.finfo(np.float32).eps)
_CHANCE = 1e-3


class Removed(NamedTuple):
    """s · B₀ A₀ is what was taken out of W: `a` [r, in], `b` [out, r].

    `uncertainty`: how far PEFT, which decomposes in float32, may have taken out something else, as a share of W. 1 if
    the r-th singular value equals the next.
    """

    a: Matrix
    b: Matrix
    uncertainty: float

    @property
    def is_chance(self) -> bool:
        """Whether PEFT itself may get another answer on another machine."""
        return self.uncertainty > _CHANCE


def pissa(weight: Matrix, rank: int, scale: float) -> Removed:
    """The part of `weight` [out, in] with the `rank` greatest singular values; `rank` ≤ min(out, in)."""
    return _singular(weight, rank, scale, greatest=True)


def kasa(weight: Matrix, rank: int, scale: float) -> Removed:
    """The part of `weight` [out, in] with the `rank` smallest singular values; `rank` < min(out, in)."""
    return _singular(weight, rank, scale, greatest=False)


def olora(weight: Matrix, rank: int, scale: float) -> Removed:
    """`scale` times the first `rank` terms of `weight` [out, in] = QR; `rank` ≤ min(out, in)."""
    columns = weight[:, :rank]
    q, r = np.linalg.qr(columns)
    # How far each column leaves the span of those before it, as a share of its length.
    new = np.abs(np.diagonal(r)) / np.maximum(np.linalg.norm(columns, axis=0), np.finfo(np.float64).tiny)
    return Removed(q.T @ weight, q, min(1.0, _FLOAT32_EPS / max(float(new.min()), _FLOAT32_EPS)))


REMOVED: dict[str, Callable[[Matrix, int, float], Removed]] = {"pissa": pissa, "olora": olora, "kasa": kasa}


def _singular(weight: Matrix, rank: int, scale: float, greatest: bool) -> Removed:
    """Singular vectors of the shorter side are the eigenvectors of its Gram matrix."""
    is_tall = weight.shape[0] >= weight.shape[1]
    gram = weight.T @ weight if is_tall else weight @ weight.T
    squares, vectors = np.linalg.eigh(gram)  # ascending
    border = len(squares) - rank if greatest else rank
    taken = vectors[:, border:] if greatest else vectors[:, :border]
    divided = np.sqrt(np.maximum(squares[max(border - 1, 0) : border + 1], 0))
    uncertainty = _uncertainty(*divided) if len(divided) == 2 and border else 0.0  # else all of W is taken
    if is_tall:
        return Removed(taken.T, weight @ taken / scale, uncertainty)
    return Removed(taken.T @ weight, taken / scale, uncertainty)


def _uncertainty(low: float, high: float) -> float:
    """Of two neighbouring singular values, one taken: rounding turns its direction by eps · ‖W‖ / gap to the other."""
    if high == low:
        return float(high > 0)
    return min(1.0, _FLOAT32_EPS * high / (high - low))
