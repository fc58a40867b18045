"""`check`s of `shared.config` for numbers: what is out of range is refused at the start, and the range is named.

Every number that reaches a library or the system has both ends: far beyond what is sensible, below what breaks them.
"""

from collections.abc import Callable

Check = Callable[[float], str | None]

MOST = (1 << 31) - 1


def between(least: int, most: int) -> Check:
    """A `check` for a number from `least` to `most`, both included."""
    return lambda value: None if least <= value <= most else f"{least} to {most}"


def is_positive(value: float) -> str | None:
    """A `check` for an amount or a time that there must be."""
    return None if 0 < value <= MOST else f"a number above 0, at most {MOST}"


def is_limit(value: float) -> str | None:
    """A `check` for a limit that may be none."""
    return None if 0 <= value <= MOST else f"0 for no limit, or a number up to {MOST}"
