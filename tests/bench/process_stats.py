"""What a process has used, from /proc: processor time says the same on a busy machine as on an idle one."""

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of all its children, in steps of 10 ms."""
    own = sum(_times(pid))
    try:
        return (own + sum(sum(_times(child)[:2]) for child in _children(pid))) / _TICKS
    except (FileNotFoundError, ProcessLookupError):  # a child has ended: its time is the process' own from now on
        return cpu_seconds(pid)


def reset_peak(pid: int) -> None:
    """`peak_bytes` begins anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most resident memory since `reset_peak`."""
    return _status_bytes(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """Resident memory now."""
    return _status_bytes(pid, "VmRSS")


def _times(pid: int) -> list[int]:
    """Ticks: user and system time of the process, then of the children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
