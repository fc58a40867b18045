"""Why a call was cut off before its handler had ended: its client left, was too slow, or its deadline passed.

Handlers only see that they are cancelled, or closed.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from shared.errors import ClientTooSlow, DeadlineUnreachable, LoraplexError

CANCELLED = "CANCELLED"  # the client left; in place of an error's reason
_TRANSIT_SECONDS = 0.05  # a deadline ends later here than at the client, who ends the call then


@dataclass(eq=False)
class Cut:
    """Of the call that a task handles. `is_slow`: it was cut because its client did not read."""

    is_slow: bool = False


CUT: ContextVar[Cut | None] = ContextVar("cut", default=None)  # set by `shared.call_limits`


def cut_off_by(context: Any) -> type[LoraplexError] | None:
    """The error that the client of this task's call, which was cut off, is told; None if the client left."""
    cut = CUT.get()
    if cut is not None and cut.is_slow:
        return ClientTooSlow
    remaining = context.time_remaining()
    return DeadlineUnreachable if remaining is not None and remaining <= _TRANSIT_SECONDS else None


def cut_off_reason(context: Any) -> str:
    """The reason of that error, or CANCELLED."""
    error = cut_off_by(context)
    return CANCELLED if error is None else error.reason
