"""Writes a file on a thread of its own, while its caller reads and hashes what comes next."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from types import TracebackType


class WriteBehind:
    """Appends to `target`, at most `depth` pieces behind. At its end everything is written, or OSError raised."""

    def __init__(self, target: RawIOBase, depth: int) -> None:
        self._target = target
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, "write")
        self._writing: deque[Future[None]] = deque()

    def write(self, piece: bytes) -> None:
        """Soon. Raises OSError of an earlier piece."""
        if len(self._writing) == self._depth:
            self._writing.popleft().result()
        self._writing.append(self._thread.submit(self._write, piece))

    def _write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            view = view[self._target.write(view) or 0 :]

    def __enter__(self) -> "WriteBehind":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            for written in self._writing:
                written.result()
