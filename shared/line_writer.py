"""Writes lines to a file descriptor for who must never wait for it, nor fail with it: logs."""

import contextlib
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from typing import Self

MOST_BYTES = 4 << 20
DRAIN_SECONDS = 2.0


class LineWriter:
    """A thread writes; `write` only queues. What cannot be written, for the reader is gone, the disk is full, or the
    pipe is and more than `most_bytes` wait, is lost: the oldest first. A notice takes its place once writing works.

    Args:
        fd: Where to. It stays open, and may be non-blocking.
        notice: The line that says how many lines were lost.
        most_bytes: That may wait.
    """

    def __init__(self, fd: int, notice: Callable[[int], str], most_bytes: int = MOST_BYTES) -> None:
        self._fd = fd
        self._notice = notice
        self._most_bytes = most_bytes
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_lost = 0  # since the last notice
        self._is_writing = self._is_closed = False
        self._is_cut = False  # the last line that was begun has no end
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"lines to {fd}", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def write(self, line: str) -> None:
        """Have `line` written, which ends with a newline. Returns at once and raises nothing, from any thread."""
        data = line.encode(errors="backslashreplace")
        with self._changed:
            if self._is_closed:
                return
            self._lines.append(data)
            self._num_bytes += len(data)
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= len(self._lines.popleft())
                self._num_lost += 1
            self._changed.notify_all()

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until nothing waits to be written, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not (self._lines or self._is_writing), seconds)

    def close(self) -> None:
        """Drain, and take no more lines. What cannot be written by then is lost."""
        self.drain()
        with self._changed:
            self._lines.clear()
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if not self._lines:
                    return
                line, num_lost = self._lines.popleft(), self._num_lost
                self._num_bytes -= len(line)
                self._is_writing = True
            is_told = not num_lost or self._try(self._notice(num_lost).encode())
            is_written = self._try(line)
            with self._changed:
                self._num_lost += (not is_written) - (num_lost if is_told else 0)

    def _try(self, line: bytes) -> bool:
        """Whether it was written as a whole. The rest of one that was cut off is not written later."""
        rest = b"\n" + line if self._is_cut else line
        try:
            while rest:
                rest = rest[self._write(rest) :]
                self._is_cut = True
        except OSError:
            return False
        self._is_cut = False
        return True

    def _write(self, data: bytes) -> int:
        """Wait until a part of it is written; the bytes of that."""
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:  # who shares the descriptor may have made it so
                waiting = select.poll()
                waiting.register(self._fd, select.POLLOUT)
                waiting.poll()


def standard_stream(number: int) -> int:
    """The descriptor of standard output (1) or error (2), for a process that waits for neither.

    A process that was started without one gets /dev/null: else the number would be that of the next file or socket,
    and lines would be written into it. A pipe is opened anew, so as to be non-blocking for this process alone:
    libraries (gRPC of each failed handshake) write their own lines there, and would wait for a reader too.
    """
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
    if is_pipe:
        with contextlib.suppress(OSError):  # another user's, or nobody reads it any more: writes fail at once
            own = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
            os.dup2(own, number)
            os.close(own)
    return number
