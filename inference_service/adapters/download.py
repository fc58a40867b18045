"""Downloads an adapter's files in parts, several at once, and hashes them in order while the rest still comes."""

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import NamedTuple

from shared.digest import FileEntry
from shared.errors import DigestMismatch, Draining, SourceUnavailable
from shared.sources import advice
from shared.sources.resolver import RangedSource

PART_BYTES = 16 << 20
NUM_STREAMS = 4  # of one download; each download has its own, so that a slow one takes none from others
_PIECE_BYTES = 1 << 20
STALL_SECONDS = 30.0  # without a byte; sources have limits of their own, but a plugin may have none
_POLL_SECONDS = 0.1  # how soon a closing is noticed
_RETRY_SECONDS = 5.0


class Part(NamedTuple):
    """Bytes [start, end) of a file."""

    file: FileEntry
    start: int
    end: int


def parts_of(files: Sequence[FileEntry]) -> list[Part]:
    """All bytes of `files`, in order."""
    return [
        Part(file, start, min(start + PART_BYTES, file.size))
        for file in files
        for start in range(0, file.size, PART_BYTES)
    ]


def ignore(_: int) -> None:
    """For those who need not know of bytes as they come."""


def download(
    source: RangedSource,
    files: Sequence[FileEntry],
    folder: Path,
    uri: str,
    stopping: threading.Event,
    on_bytes: Callable[[int], None] = ignore,
    stall_seconds: float = STALL_SECONDS,
) -> None:
    """Write exactly `files` into the empty `folder`, verified. Blocks.

    No thread of it is waited for once it has failed: one that hangs in a read writes to a deleted file at most. A
    source of which no byte comes for `stall_seconds` is given up.

    Raises:
        DigestMismatch: a file is not what the manifest says.
        Draining: `stopping` was set.
        LoraplexError: what the source raises.
        OSError: the folder cannot be written, or has no room for all.
    """
    for file in files:
        _reserve(folder / file.path, file.size)
    running = _Streams(source, parts_of(files), folder, uri, stopping, stall_seconds)
    try:
        running.start()
        for file in files:
            _verify(file, folder / file.path, running, uri, on_bytes)
    finally:
        running.abandon()


def mismatch(file: FileEntry, uri: str, problem: str) -> DigestMismatch:
    """The error for a source that does not have what was registered."""
    metadata = {"uri": uri, "file": file.path, "sha256": file.sha256}
    return DigestMismatch(f"{file.path} in {uri} {problem}; {advice.REPLACED}", metadata=metadata)


class _Streams:
    """Threads that take one part after another."""

    def __init__(
        self,
        source: RangedSource,
        parts: Sequence[Part],
        folder: Path,
        uri: str,
        stopping: threading.Event,
        stall_seconds: float,
    ) -> None:
        self._source = source
        self._folder = folder
        self._uri = uri
        self._stopping = stopping
        self._left = deque(parts)
        self._ended: Queue[tuple[Part, Exception | None]] = Queue()
        self._done: set[Part] = set()
        self._stall_seconds = stall_seconds
        self._moved_at = time.monotonic()
        self._is_over = threading.Event()

    def start(self) -> None:
        for _ in range(min(NUM_STREAMS, len(self._left))):
            # Daemons: one that hangs must not keep the process from ending.
            threading.Thread(target=self._work, name="download", daemon=True).start()

    def abandon(self) -> None:
        """Nobody waits for what is left."""
        self._is_over.set()

    def wait_for(self, part: Part) -> None:
        """Until the part is written. Raises what came in the way of any part."""
        while part not in self._done:
            if self._stopping.is_set():
                raise Draining("the replica is stopping")
            try:
                ended, error = self._ended.get(timeout=_POLL_SECONDS)
            except Empty:
                if time.monotonic() - self._moved_at > self._stall_seconds:
                    problem = f"{self._uri} has sent nothing for {self._stall_seconds:g} seconds"
                    raise SourceUnavailable(problem, metadata={"uri": self._uri}, retry_after=_RETRY_SECONDS) from None
                continue
            if error is not None:
                raise error
            self._done.add(ended)

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                part = self._left.popleft()
            except IndexError:
                return
            outcome: Exception | None = None
            try:
                self._copy(part)
            except Exception as error:  # whoever waits raises it
                outcome = error
            self._ended.put((part, outcome))

    def _copy(self, part: Part) -> None:
        file, offset, end = part
        with self._source.open_range(file.path, offset, end) as stream:
            if stream.size != file.size:
                problem = f"has {stream.size} bytes instead of the {file.size} that were registered"
                raise mismatch(file, self._uri, problem)
            fd = os.open(self._folder / file.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                while offset < end and not self._is_over.is_set():
                    piece = stream.read(min(_PIECE_BYTES, end - offset))
                    if not piece:
                        raise mismatch(file, self._uri, f"ends at byte {offset} of {file.size}")
                    self._moved_at = time.monotonic()
                    offset += _write(fd, piece, offset)
            finally:
                os.close(fd)


def _write(fd: int, piece: bytes, offset: int) -> int:
    written = 0
    while written < len(piece):
        written += os.pwrite(fd, memoryview(piece)[written:], offset + written)
    return written


def _reserve(path: Path, size: int) -> None:
    """A file of `size` bytes, which the volume has promised to hold. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _verify(file: FileEntry, path: Path, running: _Streams, uri: str, on_bytes: Callable[[int], None]) -> None:
    """Hash the file part by part as they come; what was just written is read from memory."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as written:
        for part in parts_of([file]):
            running.wait_for(part)
            left = part.end - part.start
            while left and (piece := written.read(min(_PIECE_BYTES, left))):
                hasher.update(piece)
                left -= len(piece)
                on_bytes(len(piece))
        if hasher.hexdigest() != file.sha256:
            raise mismatch(file, uri, "is not what was registered")
