"""Which process of a running replica does what, and their violent deaths."""

import signal
from collections.abc import Sequence
from typing import Literal

import psutil

from examples.stack import Stack

Role = Literal["engine", "adapters", "api"]

_MODULES: dict[Role, str] = {
    "engine": "inference_service.engine.process",
    "adapters": "inference_service.adapters.process",
    "api": "inference_service.server",
}


def processes_of(stack: Stack, role: Role) -> list[psutil.Process]:
    """The replica's living processes of this role."""
    assert stack.inference.process is not None
    children = psutil.Process(stack.inference.process.pid).children()
    return [child for child in children if _MODULES[role] in _command_line(child)]


def _command_line(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return ()


def kill(process: psutil.Process) -> None:
    """SIGKILL: no last words."""
    process.send_signal(signal.SIGKILL)
