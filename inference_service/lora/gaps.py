"""Byte ranges of an arena: which are free, and where chunks fit into them. Pure functions on sorted tuples."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

UNIT = 256


class Range(NamedTuple):
    """Bytes `start` up to `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes in it."""
        return self.end - self.start


class Fit(NamedTuple):
    """Where each chunk goes, in the order asked for, and the gaps that remain."""

    offsets: tuple[int, ...]
    gaps: tuple[Range, ...]


def round_up(nbytes: int) -> int:
    """`nbytes` as the arena counts them: whole units."""
    return -(-nbytes // UNIT) * UNIT


def coalesce(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Disjoint ranges in order, adjacent ones joined, empty ones dropped."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and joined[-1].end == start:
            joined[-1] = Range(joined[-1].start, end)
        elif start < end:
            joined.append(Range(start, end))
    return tuple(joined)


def complement(ranges: Iterable[Range], end: int) -> tuple[Range, ...]:
    """What disjoint `ranges` leave of the bytes 0 up to `end`."""
    bounds = [0, *(bound for taken in coalesce(ranges) for bound in taken), end]
    return tuple(Range(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b)


def fit(gaps: Sequence[Range], sizes: Sequence[int]) -> Fit | None:
    """Place chunks of `sizes` bytes (whole units), or None where they do not fit.

    All together into the smallest gap that holds them, since an adapter that is one piece leaves one piece; else each,
    largest first, into the smallest gap that holds it.
    """
    if not sizes:
        return Fit((), tuple(gaps))
    total = sum(sizes)
    if total > sum(gap.size for gap in gaps):
        return None
    whole = min(
        (gap for gap in gaps if gap.end - gap.start >= total), key=lambda gap: gap.end - gap.start, default=None
    )
    if whole is not None:
        offsets = tuple(accumulate(sizes[:-1], initial=whole.start))
        return Fit(offsets, without(gaps, [Range(whole.start, whole.start + total)]))
    return _fit_apart(gaps, sizes)


def without(gaps: Sequence[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """`gaps` less `taken`, which lie inside them."""
    end = max((gap.end for gap in gaps), default=0)
    return complement([*complement(gaps, end), *taken], end)


def _fit_apart(gaps: Sequence[Range], sizes: Sequence[int]) -> Fit | None:
    room = [gap for gap in gaps if gap.size >= min(sizes)]
    offsets = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        best = min((gap for gap in room if gap.size >= sizes[index]), key=lambda gap: gap.size, default=None)
        if best is None:
            return None
        offsets[index] = best.start
        room[room.index(best)] = Range(best.start + sizes[index], best.end)
    return Fit(tuple(offsets), without(gaps, [Range(o, o + s) for o, s in zip(offsets, sizes, strict=True)]))
