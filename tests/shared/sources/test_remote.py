"""Reading through any sequence of faults gives the file's bytes in order, or says that it cannot."""

import threading
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import SourceForbidden, SourceUnavailable
from shared.sources.policy import Access, Patience
from shared.sources.remote import HEAD_BYTES, Body, RemoteFile, extent, range_header, retry_after, status_error

CONTENT = bytes(range(251)) * 1200  # 301,200 bytes: more than a head and a piece
METADATA = {"uri": "x://a", "file": "w"}


class Step(NamedTuple):
    """What one request gets: nothing, or a body that begins where a server without ranges would, and its length."""

    is_refused: bool
    has_ranges: bool
    length: int  # after so many bytes it is interrupted
    is_loud: bool  # by an error, else by an end


steps = st.builds(Step, st.booleans(), st.booleans(), st.integers(0, 400_000), st.booleans())


class Server:
    """Answers requests by steps, then without faults; `asked` are the ranges."""

    def __init__(self, plan: list[Step], content: bytes = CONTENT) -> None:
        self.plan = list(plan)
        self.content = content
        self.etag = "e"
        self.asked: list[tuple[int, int]] = []
        self.num_open = 0

    def open_range(self, start: int, end: int) -> Body:
        self.asked.append((start, end))
        step = self.plan.pop(0) if self.plan else Step(False, True, 1 << 30, False)
        if step.is_refused:
            raise SourceUnavailable("refused", metadata=METADATA)
        first, last = (start, end) if step.has_ranges else (0, len(self.content))
        position, left = first, step.length
        last = min(last, len(self.content))
        self.num_open += 1

        def read(count: int) -> bytes:
            nonlocal position, left
            if left == 0 and step.is_loud:
                raise SourceUnavailable("interrupted", metadata=METADATA)
            piece = self.content[position : min(position + min(count, left), last)]
            position, left = position + len(piece), left - len(piece)
            return piece

        def close() -> None:
            self.num_open -= 1

        return Body(first, last, len(self.content), self.etag, read, close)


def opened(server: Server, start: int = 0, end: int | None = None, **patience: float) -> RemoteFile:
    quick = Patience(first_delay=0.0, longest_delay=0.0)._replace(**patience)  # type: ignore[arg-type]
    access = Access({}, None, (), lambda uri: True, threading.Event(), quick)
    return RemoteFile(server.open_range, access, METADATA, start, end)


def rest(file: RemoteFile, count: int = 100_000) -> bytes:
    with file:
        return b"".join(iter(lambda: file.read(count), b""))


@settings(deadline=None)
@given(st.lists(steps, max_size=12), st.integers(5_000, 400_000))
def test_what_is_read_is_the_file_whatever_happens(plan: list[Step], count: int) -> None:
    server = Server(plan)
    found, failure = b"", None
    try:
        with opened(server) as file:
            while piece := file.read(count):
                found += piece
    except SourceUnavailable as error:
        failure = error
    assert server.num_open == 0
    if failure is None:
        assert found == CONTENT
    else:
        assert failure.retry_after
        assert len(plan) >= 5  # fewer faults than attempts are overcome
        assert CONTENT.startswith(found)


@settings(deadline=None)
@given(st.integers(0, len(CONTENT) - 1), st.integers(1, len(CONTENT)), st.lists(steps, max_size=4))
def test_a_range_is_a_range(start: int, length: int, plan: list[Step]) -> None:
    end = min(start + length, len(CONTENT))
    server = Server(plan)
    assert rest(opened(server, start, end)) == CONTENT[start:end]
    assert all(start <= first < end and last == end for first, last in server.asked)


def test_the_head_comes_alone_and_the_rest_at_once() -> None:
    server = Server([])
    assert rest(opened(server)) == CONTENT
    assert server.asked == [(0, HEAD_BYTES), (HEAD_BYTES, len(CONTENT))]


@pytest.mark.parametrize("change", ["etag", "content"])
def test_a_file_that_changes_is_not_read_on(change: str) -> None:
    server = Server([])
    file = opened(server)
    assert file.read(10) == CONTENT[:10]
    if change == "etag":
        server.etag = "f"
    else:
        server.content = CONTENT + b"x"
    with pytest.raises(SourceUnavailable, match="changed"):
        rest(file)
    assert len(server.asked) == 2


def test_progress_is_what_attempts_are_counted_without() -> None:
    short = [Step(False, True, 10_000, True)] * 40
    assert rest(opened(Server(short))) == CONTENT
    with pytest.raises(SourceUnavailable):
        opened(Server([Step(True, True, 0, True)] * 5))


def test_no_further_attempt_is_made_of_what_has_brought_nothing_for_long() -> None:
    silent = Step(False, True, 0, True)
    server = Server([Step(False, True, 10_000, True), silent, silent])
    with pytest.raises(SourceUnavailable) as caught:
        rest(opened(server, 0, len(CONTENT), stall=0.0))
    assert caught.value.retry_after
    assert len(server.asked) == 1
    assert rest(opened(server, 0, len(CONTENT), stall=60.0)) == CONTENT


def test_what_is_refused_for_good_is_not_asked_again() -> None:
    asked = []

    def refuse(start: int, end: int) -> Body:
        asked.append(start)
        raise SourceForbidden("no", metadata=METADATA)

    access = Access({}, None, (), lambda uri: True, threading.Event())
    with pytest.raises(SourceForbidden):
        RemoteFile(refuse, access, METADATA)
    assert len(asked) == 1


@given(st.integers(200, 599), st.none() | st.text(max_size=40), st.none() | st.text(max_size=12))
def test_headers_of_strangers_raise_nothing(status: int, content_range: str | None, length: str | None) -> None:
    found = extent(status, content_range, length)
    assert found is None or 0 <= found[0] <= found[1] <= found[2]
    assert (retry_after(length) or 0) >= 0
    if status >= 400:
        assert status_error(status, "x", {}).message


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 40))
def test_a_range_and_its_answer_agree(start: int, length: int) -> None:
    end = start + length
    answer = range_header(start, end).replace("=", " ") + f"/{end + 7}"
    assert extent(206, answer, None) == (start, end, end + 7)
