"""What is written behind is written, or said not to be."""

import io
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapters.write_behind import WriteBehind


class Dribbling(io.RawIOBase):
    """Takes at most three bytes at a time."""

    def __init__(self) -> None:
        self.taken = b""

    def write(self, data: object) -> int:
        piece = bytes(memoryview(data)[:3])  # type: ignore[call-overload]
        self.taken += piece
        return len(piece)


@given(st.lists(st.binary(max_size=20)), st.integers(1, 3))
def test_everything_is_written_in_order(pieces: list[bytes], depth: int) -> None:
    target = Dribbling()
    with WriteBehind(target, depth) as writer:
        for piece in pieces:
            writer.write(piece)
    assert target.taken == b"".join(pieces)


@pytest.mark.parametrize("num_pieces", [1, 2, 9])
def test_a_full_disk_is_told_before_the_end(num_pieces: int) -> None:
    def fill() -> None:
        with Path("/dev/full").open("wb", buffering=0) as target, WriteBehind(target, 2) as writer:
            for _ in range(num_pieces):
                writer.write(b"x")

    with pytest.raises(OSError, match="No space"):
        fill()


def test_no_more_than_so_many_pieces_are_in_memory() -> None:
    gate, handed_over = threading.Event(), []

    class Slow(io.RawIOBase):
        def write(self, data: object) -> int:
            gate.wait(20)
            return len(data)  # type: ignore[arg-type]

    def feed() -> None:
        with WriteBehind(Slow(), 3) as writer:
            for number in range(10):
                writer.write(b"x")
                handed_over.append(number)

    feeder = threading.Thread(target=feed)
    feeder.start()
    feeder.join(0.2)
    assert len(handed_over) <= 3
    gate.set()
    feeder.join(20)
    assert len(handed_over) == 10
