"""Lines for who must not wait: what cannot be written is lost, is counted, and holds nobody up."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.line_writer import LineWriter

PATIENCE_SECONDS = 60.0


def notice(num_lost: int) -> str:
    return f"{num_lost} lost\n"


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends; who has closed one has put something else there."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def to_file(fd: int, path: Path) -> None:
    """From now on `fd` is this file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, fd)
    os.close(file)


def test_a_full_disk_costs_the_lines_of_that_time_and_no_more(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    with LineWriter(fd, notice) as lines:
        for number in range(3):
            lines.write(f"lost {number}\n")
        lines.drain(PATIENCE_SECONDS)
        to_file(fd, tmp_path / "log")
        for number in range(2):
            lines.write(f"kept {number} \udcff\n")
    os.close(fd)
    assert (tmp_path / "log").read_text() == "3 lost\nkept 0 \\udcff\nkept 1 \\udcff\n"


def test_who_does_not_read_loses_the_oldest_and_nobody_waits(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    total, size = 4_000, 100  # four times what the pipe and the queue hold
    with LineWriter(writer, notice, most_bytes=20 * size) as lines:
        for number in range(total):
            lines.write(f"{number:{size - 1}}\n")
        read = b""
        while f"{total - 1}\n".encode() not in read:
            read += os.read(reader, 1 << 16)
    said = read.decode().splitlines()
    numbers = [int(line) for line in said if "lost" not in line]
    lost = {said.index(line): int(line.split()[0]) for line in said if "lost" in line}
    assert len(numbers) + sum(lost.values()) == total
    assert numbers == sorted(numbers)
    assert lost
    for at, count in lost.items():  # a notice stands where its lines are missing
        before = int(said[at - 1]) if at else -1
        assert int(said[at + 1]) - before == count + 1


def test_a_line_that_was_cut_off_does_not_spoil_the_next(pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, writer = pipe
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)  # as by another process that shares it
    with LineWriter(writer, notice) as lines:
        lines.write("a" * (1 << 20) + "\n")
        assert os.read(reader, 10) == b"a" * 10  # it was begun
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, reader)  # its reader goes away
        os.close(null)
        lines.drain(PATIENCE_SECONDS)
        to_file(writer, tmp_path / "log")
        lines.write("b\n")
    assert (tmp_path / "log").read_text() == "\n1 lost\nb\n"


def test_a_non_blocking_descriptor_loses_nothing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    said = "".join(f"{number:999}\n" for number in range(200))
    with LineWriter(writer, notice) as lines:
        for line in said.splitlines(keepends=True):
            lines.write(line)
        read = b""
        while len(read) < len(said):
            read += os.read(reader, 1 << 16)
    assert read.decode() == said


def test_the_end_of_a_process_waits_for_nobody_who_does_not_read() -> None:
    """Nor does the interpreter: the thread that is stuck in a write holds nothing that its end needs."""
    program = """
import logging
from shared import log
with log.open_lines("x", 2) as errors:
    log.setup("x", "info", errors)
    for _ in range(10_000): logging.info("a line that nobody reads")
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run([sys.executable, "-c", program], stderr=theirs, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0


def test_what_libraries_write_themselves_waits_for_nobody_either() -> None:
    """They know nothing of the writer: more than a pipe holds goes to the descriptor itself, and is cut off."""
    program = """
import os
from shared import log
with log.open_lines("x", 2):
    try: os.write(2, b"." * (1 << 20))
    except BlockingIOError: pass
    try: os.write(2, b".")
    except BlockingIOError: print("full")
"""
    reader, writer = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, timeout=PATIENCE_SECONDS, check=True
    )
    assert done.stdout == b"full\n"
    assert os.get_blocking(writer)  # it is nobody else's business
    os.close(reader)
    os.close(writer)


def test_what_a_log_has_lost_is_told_in_it(tmp_path: Path) -> None:
    program = f"""
import logging, os
from shared import log
with log.open_lines("x", 2) as errors:
    log.setup("x", "info", errors)
    for _ in range(3): logging.info("on a full disk")
    logging.info("%d", "which is no number")
    errors.drain(60)
    os.dup2(os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_CREAT), 2)
    logging.info("there is room again")
"""
    with Path("/dev/full").open("w") as full:
        subprocess.run([sys.executable, "-c", program], stderr=full, timeout=PATIENCE_SECONDS, check=True)
    told, again = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (told["level"], told["service"], told["lines"]) == ("warning", "x", 4)
    assert told["message"] == "lines were lost: they could not be written"
    assert again["message"] == "there is room again"


@pytest.mark.parametrize("number", [1, 2])
def test_a_process_without_the_stream_writes_into_none_of_its_files(tmp_path: Path, number: int) -> None:
    program = f"""
import os
os.close({number})
from shared import log
lines = log.open_lines("x", {number})
file = open("kept", "w")
lines.write("a line")
lines.close()
"""
    subprocess.run(["env", f"PYTHONPATH={Path.cwd()}", sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "kept").read_text() == ""
