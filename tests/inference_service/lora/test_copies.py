"""Copies arrive in order and whole, wait for the steps before them, and are bounded in flight."""

from collections.abc import Iterable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.lora.copies import LEAST_IN_FLIGHT, LINK_SHARE, MOST_IN_FLIGHT, AdapterCopy, CopyQueue, Piece

MIB = 1 << 20


class Issued:
    """Pieces on their way, which arrive when the test says so."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = list(pieces)
        self.nbytes = sum(piece.target.numel() for piece in self.pieces)
        self.has_arrived = False

    def query(self) -> bool:
        return self.has_arrived


class SlowLink:
    """What was issued, in order. `events` has "steps" where copies begin to wait for the steps before them."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.events: list[Issued | str] = []

    def follow_steps(self) -> None:
        self.events.append("steps")

    def issue(self, pieces: Iterable[Piece]) -> Issued:
        self.issued.append(Issued(pieces))
        self.events.append(self.issued[-1])
        return self.issued[-1]

    @property
    def under_way(self) -> list[Issued]:
        return [each for each in self.issued if not each.has_arrived]


class World:
    """A queue of copies of `sizes` MiB, in pieces of at most 2 MiB. Tensors have a size and no memory."""

    def __init__(self) -> None:
        self.link, self.now = SlowLink(), 0.0
        self.queue = CopyQueue(self.link, lambda: self.now)
        self.copies: list[AdapterCopy] = []
        self.pieces: list[list[Piece]] = []
        self.arrived: list[int] = []

    def add(self, size: int) -> None:
        number = len(self.copies)
        flat = torch.empty(size, dtype=torch.uint8, device="meta")
        self.pieces.append([Piece(part, part) for part in torch.split(flat, 2 * MIB)] if size else [])
        self.copies.append(self.queue.add(self.pieces[-1], lambda: self.arrived.append(number)))

    def arrive(self) -> None:
        """The oldest that is under way."""
        if self.link.under_way:
            self.link.under_way[0].has_arrived = True


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 40 * MIB), st.sampled_from(["arrive", "step", "long step"])), max_size=40))
def test_copies_are_in_order_and_bounded(moves: list[int | str]) -> None:
    world = World()
    for move in moves:
        if isinstance(move, int):
            world.add(move)
        elif move == "arrive":
            world.arrive()
        else:
            world.now += 0.0002 if move == "step" else 0.1
            world.queue.advance()
            if any(not copy.has_arrived for copy in world.copies):
                assert world.link.under_way, "the link is idle"
        assert sum(each.nbytes for each in world.link.under_way) < MOST_IN_FLIGHT + 2 * MIB
        assert world.arrived == list(range(len(world.arrived)))
    while not all(copy.is_done() for copy in world.copies):
        world.arrive()
    assert world.arrived == list(range(len(world.copies))), "each is told of once"
    issued = [id(piece.target) for each in world.link.issued for piece in each.pieces]
    assert issued == [id(piece.target) for pieces in world.pieces for piece in pieces], "each piece once, in order"
    assert all(copy.bytes_left == 0 for copy in world.copies)


@given(st.floats(0, 1))
def test_the_longer_the_steps_the_more_is_in_flight(seconds: float) -> None:
    world = World()
    world.now = seconds
    world.add(64 * MIB)
    most = min(max(seconds * LINK_SHARE, LEAST_IN_FLIGHT), MOST_IN_FLIGHT)
    assert most <= sum(each.nbytes for each in world.link.under_way) < most + 2 * MIB


def test_more_is_issued_once_half_has_arrived() -> None:
    world = World()
    world.add(64 * MIB)
    world.queue.advance()
    assert len(world.link.issued) == 1, "all that may be is under way"
    world.arrive()
    world.queue.advance()
    assert len(world.link.issued) == 2


def test_a_copy_waits_for_the_steps_before_it() -> None:
    world = World()
    world.add(MIB)
    world.add(MIB)
    first, second = world.link.issued
    assert world.link.events == ["steps", first, "steps", second]


def test_an_adapter_is_there_when_its_last_piece_is() -> None:
    world = World()
    world.add(LEAST_IN_FLIGHT + MIB)
    assert not world.copies[0].is_done()
    world.arrive()
    assert not world.copies[0].is_done(), "its last piece has only now been issued"
    assert world.copies[0].bytes_left == 0
    world.arrive()
    assert world.copies[0].is_done()
