"""Which chunks to move so that others fit, though their bytes are free only in pieces. Pure functions on ranges.

Neighbouring gaps are joined by sliding what lies between them. Each time that leaves fewer gaps, and when there is only
one left, everything fits. To clear a nearly empty region instead, into gaps elsewhere, moves hardly less (a tenth, in a
simulation): when bytes are just enough, what is left of gaps is too small for whole chunks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from inference_service.lora.gaps import Range


class Lack(NamedTuple):
    """The largest chunk that fits nowhere, and what larger ones leave of each gap (empty ranges too)."""

    size: int
    left: tuple[Range, ...]


class Joining(NamedTuple):
    """`bytes_moved` is what it takes to join the gaps in `region`, which begins and ends with one."""

    bytes_moved: int
    region: Range


def find_lack(gaps: Sequence[Range], sizes: Sequence[int]) -> Lack:
    """What keeps chunks of `sizes` bytes from fitting into `gaps`; size 0 if nothing does."""
    left = list(gaps)
    for size in sorted(sizes, reverse=True):
        index = min((i for i, gap in enumerate(left) if gap.size >= size), key=lambda i: left[i].size, default=None)
        if index is None:
            return Lack(size, tuple(left))
        left[index] = Range(left[index].start + size, left[index].end)
    return Lack(0, tuple(left))


def plan_joining(gaps: Sequence[Range], lack: Lack, fixed: Sequence[Range]) -> Joining | None:
    """The neighbouring gaps that together hold what is lacking with the fewest bytes between them.

    Args:
        gaps: Coalesced.
        lack: Of them.
        fixed: Ranges that may not be moved, in order.

    Returns:
        None if `fixed` ranges are in the way.
    """
    ends = [0, *(gap.end for gap in gaps)]
    bytes_before = list(accumulate(gap.start - end for end, gap in zip(ends, gaps, strict=False)))  # that are taken
    best: Joining | None = None
    first, total = 0, 0
    for last, gap in enumerate(gaps):
        if last and _overlaps_any(fixed, Range(gaps[last - 1].end, gap.start)):
            first, total = last, 0
        total += lack.left[last].size
        while first < last and total - lack.left[first].size >= lack.size:
            total -= lack.left[first].size
            first += 1
        plan = Joining(bytes_before[last] - bytes_before[first], Range(gaps[first].start, gap.end))
        if first < last and total >= lack.size and (best is None or plan < best):
            best = plan
    return best


def _overlaps_any(ranges: Sequence[Range], region: Range) -> bool:
    """Whether one of the disjoint `ranges`, in order, overlaps `region`."""
    index = bisect_left(ranges, Range(region.end, 0))
    return index > 0 and ranges[index - 1].end > region.start
