"""Reading a file over a network that fails: in ranges, resumed where they stopped, and never from a changed file."""

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, TypeVar

from shared.errors import DigestMismatch, Draining, LoraplexError, SourceForbidden, SourceNotFound, SourceUnavailable
from shared.sources import advice
from shared.sources.policy import Access

T = TypeVar("T")

HEAD_BYTES = 64 << 10  # of a file that is read from its beginning: enough for a config, or the header of the weights
PIECE_BYTES = 256 << 10

_RETRY_SECONDS = 5.0  # what callers are told where the source says nothing
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_RETRIED = (408, 425, 429)


class Body(NamedTuple):
    """One answer of a server: bytes [start, end) of a file of `size` bytes. `etag` is empty where there is none.

    `read(count)` gives at least one byte, or none at the end, and raises `SourceUnavailable` when it is interrupted.
    """

    start: int
    end: int
    size: int
    etag: str
    read: Callable[[int], bytes]
    close: Callable[[], None]


class SourceChanged(SourceUnavailable):
    """The file is not the one whose reading began. Whoever begins again gets all of the new one."""


class Backoff:
    """Waits between attempts: longer each time, at random, and only as long as somebody may still want the result."""

    def __init__(self, access: Access) -> None:
        self._stopping = access.stopping
        self._patience = access.patience
        self.reset()

    def reset(self) -> None:
        """The last attempt got on."""
        self._failures, self._got_on_at = 0, time.monotonic()

    def wait_after(self, error: SourceUnavailable) -> None:
        """Waits for the next attempt.

        Raises:
            SourceUnavailable: `error`, after the last attempt, or if the server asks for more patience.
            Draining: `stopping` is set.
        """
        self._failures += 1
        asked_for, longest = error.retry_after or 0.0, self._patience.longest_delay
        is_stalled = time.monotonic() - self._got_on_at >= self._patience.stall
        is_last = is_stalled or self._failures >= self._patience.attempts
        if is_last or asked_for > longest or isinstance(error, SourceChanged):
            error.retry_after = error.retry_after or _RETRY_SECONDS
            raise error
        delay = min(longest, self._patience.first_delay * 2 ** (self._failures - 1)) * random.uniform(0.5, 1.0)
        if self._stopping.wait(max(delay, asked_for)):
            raise Draining("the service is stopping")


class Pace:
    """Notices a source that is slower than anybody waits for, however it spreads its bytes."""

    def __init__(self, access: Access, metadata: Mapping[str, str]) -> None:
        self._patience = access.patience
        self._metadata = metadata
        self._began, self._nbytes = time.monotonic(), 0

    def keep(self, nbytes: int, *, is_last: bool) -> None:
        """So many bytes more have come. Raises SourceUnavailable if these were too few for their time."""
        self._nbytes += nbytes
        elapsed = time.monotonic() - self._began
        if elapsed < self._patience.pace:
            return
        if self._nbytes < self._patience.least_rate * elapsed and not is_last:
            problem = f"{self._nbytes} bytes came in {elapsed:.0f} seconds: the source is too slow"
            raise SourceUnavailable(problem, metadata=self._metadata, retry_after=_RETRY_SECONDS)
        self._began, self._nbytes = time.monotonic(), 0


class RemoteFile:
    """Bytes [start, end) of a remote file, read from their beginning to their end.

    With `end` None it is the whole rest: a first small request brings the head and tells the size, so that whoever
    finds fault with the head never pays for the rest.

    Args:
        open_range: Asks for bytes [start, end). Raises SourceUnavailable for what may pass, else what is wrong.
        access: Of the source: how long to wait, and whether anybody still does.
        metadata: Of errors: `uri` and `file`.
    """

    def __init__(
        self,
        open_range: Callable[[int, int], Body],
        access: Access,
        metadata: Mapping[str, str],
        start: int = 0,
        end: int | None = None,
    ) -> None:
        self._open_range = open_range
        self._access = access
        self._stopping = access.stopping
        self._metadata = metadata
        self._offset = start
        self._backoff = Backoff(access)
        self._pace = Pace(access, metadata)
        self._body: Body | None = None
        first = self._patiently(lambda: self._ask(start + HEAD_BYTES if end is None else end))
        self.size, self._etag = first.size, first.etag
        self._body = first
        self._end = first.size if end is None else min(end, first.size)

    def read(self, count: int, /) -> bytes:
        """At most `count` of the next bytes; none at the end."""
        wanted = min(count, self._end - self._offset, PIECE_BYTES)
        if wanted <= 0:
            return b""
        piece = self._patiently(lambda: self._piece(wanted))
        self._backoff.reset()
        self._offset += len(piece)
        self._pace.keep(len(piece), is_last=self._offset == self._end)
        return piece

    def is_unchanged(self) -> bool:
        """Every request asked for the same file, or failed."""
        return True

    def close(self) -> None:
        """Gives the connection up."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def __enter__(self) -> "RemoteFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _patiently(self, attempt: Callable[[], T]) -> T:
        while True:
            if self._stopping.is_set():
                raise Draining("the service is stopping")
            try:
                return attempt()
            except SourceUnavailable as error:
                self.close()
                self._backoff.wait_after(error)

    def _piece(self, wanted: int) -> bytes:
        if self._body is None or self._offset >= self._body.end:
            self.close()
            self._body = self._ask(self._end)
            if (self._body.size, self._body.etag) != (self.size, self._etag):
                raise SourceChanged("the file changed while it was read", metadata=self._metadata)
        if piece := self._body.read(min(wanted, self._body.end - self._offset)):
            return piece
        raise SourceUnavailable("the answer ended early", metadata=self._metadata)

    def _ask(self, end: int) -> Body:
        """A body that begins at the offset."""
        offset = self._offset
        body = _whole(lambda: self._open_range(offset, end), self._access, self._metadata, lambda late: late.close())
        try:
            self._skip(body)
        except BaseException:
            body.close()
            raise
        return body

    def _skip(self, body: Body) -> None:
        """What a server without ranges sends before the offset is read past."""
        if self._offset < body.start < body.size:
            raise SourceUnavailable("the server answers with another range", metadata=self._metadata)
        skipped, pace = body.start, Pace(self._access, self._metadata)
        while skipped < min(self._offset, body.end):
            if not (piece := body.read(min(PIECE_BYTES, self._offset - skipped))) or self._stopping.is_set():
                raise SourceUnavailable("the answer ended early", metadata=self._metadata)
            skipped += len(piece)
            pace.keep(len(piece), is_last=skipped >= self._offset)


def patiently(attempt: Callable[[], T], access: Access, metadata: Mapping[str, str]) -> T:
    """`attempt()`, again after each `SourceUnavailable` that may pass, each within `Patience.answer`.

    Raises as `Backoff.wait_after`.
    """
    backoff = Backoff(access)
    while True:
        try:
            return _whole(attempt, access, metadata)
        except SourceUnavailable as error:
            backoff.wait_after(error)


def _whole(
    ask: Callable[[], T],
    access: Access,
    metadata: Mapping[str, str],
    discard: Callable[[T], None] = lambda _: None,
) -> T:
    """`ask()`, or SourceUnavailable if it takes longer than `Patience.answer`.

    A client waits for each byte only so long, but for a drop every few seconds without an end; no library can be told
    otherwise. So it asks in a thread of its own, which is left behind with what it waits for: `discard` gets that.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="source", daemon=True).start()
    seconds = access.patience.answer
    try:
        return answer.result(seconds)
    except TimeoutError:
        answer.add_done_callback(lambda late: None if late.exception() else discard(late.result()))
        what = f"{metadata['file']} in {metadata['uri']}" if "file" in metadata else metadata["uri"]
        problem = f"{what}: no whole answer in {seconds:g} seconds: the source is too slow"
        raise SourceUnavailable(problem, metadata=metadata, retry_after=_RETRY_SECONDS) from None


def range_header(start: int, end: int) -> str:
    """Value of `Range` for bytes [start, end)."""
    return f"bytes={start}-{end - 1}"


def extent(status: int, content_range: str | None, content_length: str | None) -> tuple[int, int, int] | None:
    """Start, end and the file's size, as an answer of status 200, 206 or 416 tells them; None if it does not."""
    if status == 200:
        is_number = content_length is not None and content_length.isascii() and content_length.isdecimal()
        return (0, int(content_length), int(content_length)) if content_length is not None and is_number else None
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:
        return None
    size = int(match[3])
    if match[1] is None:  # 416: there is nothing at that place
        return size, size, size
    start, end = int(match[1]), int(match[2]) + 1
    return (start, end, size) if start < end <= size else None


def status_error(
    status: int, what: str, metadata: Mapping[str, str], retry_after: float | None = None
) -> LoraplexError:
    """What an HTTP status that is no success means for the file or folder `what`."""
    if status in (401, 403, 451):
        return SourceForbidden(f"{what}: the server refuses access (HTTP {status}); {advice.LOGIN}", metadata=metadata)
    if status in (404, 410):
        return SourceNotFound(f"{what} does not exist; {advice.ABSENT}", metadata=metadata)
    if status == 412:
        return DigestMismatch(f"{what} was replaced after it was registered; {advice.REPLACED}", metadata=metadata)
    if 400 <= status < 500 and status not in _RETRIED:
        problem = f"{what}: the server refuses the request (HTTP {status}); check the URI and the credential"
        return SourceForbidden(problem, metadata=metadata)
    return SourceUnavailable(f"{what}: the server answers HTTP {status}", metadata=metadata, retry_after=retry_after)


def retry_after(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header; None if it does not say, or says a date."""
    return float(value) if value is not None and value.isascii() and value.isdecimal() else None
