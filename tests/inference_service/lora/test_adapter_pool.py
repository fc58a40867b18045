"""Every transition of a load, and what one adapter's trouble does to the others: nothing."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_service.lora.adapter import AdapterState, Wanted
from inference_service.lora.gaps import UNIT
from inference_service.lora.pool import MAX_AHEAD, AdapterPool
from inference_service.lora.residents import Handle, Move, StaleHandle
from inference_service.lora.slots import SlotTable
from inference_service.stats import LoadInFlight, Usage
from inference_service.types import Acquired, AcquireFailed, BlobLayout, ChunkLayout, PinOwner
from shared.errors import AdapterInvalid, AdapterMemory, SourceUnavailable

WANTED, ACQUIRING, PLACING, COPYING, READY, DRAINING, FAILED = AdapterState


class FakeCopy:
    def __init__(self) -> None:
        self.done = False
        self.bytes_left = 64

    def is_done(self) -> bool:
        return self.done


class FakeArena:
    """Copies end when told to. Slots that the kernels see are in `loaded`, with their chunks' offsets."""

    def __init__(self) -> None:
        self.copies: list[FakeCopy] = []
        self.loaded: dict[int, tuple[int, ...]] = {}
        self.moved: dict[int, list[tuple[int, int]]] = {}
        self.error: Exception | None = None

    def load(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int], host_offset: int) -> FakeCopy:
        if self.error is not None:
            raise self.error
        assert slot not in self.loaded
        self.loaded[slot] = tuple(chunk_offsets)
        self.copies.append(FakeCopy())
        return self.copies[-1]

    def clear(self, slot: int) -> None:
        del self.loaded[slot]

    def move(self, moves: Sequence[Move]) -> None:
        for handle, source, target, _ in moves:
            self.moved.setdefault(handle.slot, []).append((source, target))

    def relocate(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int]) -> None:
        """What was moved is what the kernels will look for."""
        offsets = list(self.loaded[slot])
        for source, target in self.moved.pop(slot):
            offsets[offsets.index(source)] = target
        assert offsets == list(chunk_offsets)
        assert len(layout.chunks) == len(offsets)
        self.loaded[slot] = tuple(offsets)

    def finish(self) -> None:
        for copy in self.copies:
            copy.done = True


class Bench:
    """A pool over four units and three slots, and what it asked the adapter process for."""

    def __init__(self, units: int = 4) -> None:
        self.now = 100.0
        self.acquired: list[str] = []
        self.released: list[str] = []
        self.arena = FakeArena()
        self.pool = AdapterPool(
            SlotTable(3, units * UNIT), self.arena, self.acquired.append, self.released.append, lambda: self.now
        )

    def answer(self, digest: str, units: int = 2, chunks: int = 1) -> None:
        found = tuple(ChunkLayout(i, i * units * UNIT, units * UNIT, ()) for i in range(chunks))
        self.pool.on_acquired(Acquired(digest, 0, BlobLayout(chunks * units * UNIT, 8, "float32", found)))

    def fail(self, digest: str, retry_after: float | None = 7.0) -> None:
        error = SourceUnavailable("the bucket does not answer", retry_after=retry_after)
        self.pool.on_acquire_failed(AcquireFailed(digest, error.record()))

    def ready(self, digest: str, units: int = 2, pinned: bool = False) -> None:
        self.pool.load(digest, pinned)
        self.answer(digest, units)
        self.pool.poll()
        self.arena.finish()
        self.pool.poll()
        assert self.pool.state(digest) is READY
        self.pool.check_integrity()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_load_from_nothing_to_ready(bench: Bench) -> None:
    pool = bench.pool
    assert pool.state("a") is None
    assert pool.require("a") is ACQUIRING
    assert pool.require("a") is ACQUIRING
    assert bench.acquired == ["a"]
    bench.answer("a")
    assert pool.require("a") is PLACING
    pool.check_integrity()
    pool.poll()
    assert pool.require("a") is COPYING
    assert bench.released == []
    assert pool.residents() == []
    pool.check_integrity()
    bench.arena.finish()
    pool.poll()
    assert pool.require("a") is READY
    assert bench.released == ["a"]
    assert bench.acquired == ["a"]
    (resident,) = pool.residents()
    assert (resident.digest, resident.size_bytes, resident.rank, resident.pinned) == ("a", 512, 8, False)
    assert resident.active_requests == 0
    handle = pool.acquire("a")
    assert handle == Handle(0, 1)
    assert pool.residents()[0].active_requests == 1
    pool.release(handle)
    pool.check_integrity()


def test_only_ready_adapters_can_be_acquired(bench: Bench) -> None:
    with pytest.raises(KeyError):
        bench.pool.acquire("a")
    bench.pool.require("a")
    with pytest.raises(KeyError):
        bench.pool.acquire("a")


def test_a_failure_is_remembered_and_then_tried_again(bench: Bench) -> None:
    pool = bench.pool
    pool.require("a")
    bench.fail("a")
    assert pool.require("a") is FAILED
    error = pool.error("a")
    assert isinstance(error, SourceUnavailable)
    assert error.retry_after == 7.0
    pool.check_integrity()
    bench.now += 6.9
    assert pool.require("a") is FAILED
    assert error is pool.error("a")
    assert error.retry_after == pytest.approx(0.1)
    assert bench.acquired == ["a"]
    bench.now += 0.2
    assert pool.require("a") is ACQUIRING
    assert pool.error("a") is None
    assert bench.acquired == ["a", "a"]
    bench.answer("a")
    pool.poll()
    assert pool.state("a") is COPYING


@pytest.mark.parametrize(("retry_after", "seconds"), [(0.5, 0.5), (1.0, 1.0), (7.0, 7.0), (None, 5.0)])
def test_a_failure_is_remembered_as_long_as_callers_are_told_to_wait(
    bench: Bench, retry_after: float | None, seconds: float
) -> None:
    bench.pool.require("a")
    bench.fail("a", retry_after)
    bench.now += seconds - 0.01
    assert bench.pool.require("a") is FAILED
    bench.now += 0.02
    assert bench.pool.require("a") is ACQUIRING


def test_old_failures_are_forgotten(bench: Bench) -> None:
    for digest in ("a", "b"):
        bench.pool.require(digest)
    bench.fail("a")
    bench.now += 8
    bench.fail("b")
    assert bench.pool.state("a") is None
    assert bench.pool.state("b") is FAILED


def test_the_least_recently_used_gives_way(bench: Bench) -> None:
    bench.ready("a")
    bench.ready("b")
    bench.pool.require("a")
    bench.ready("c")
    assert bench.pool.state("b") is None
    assert bench.pool.state("a") is READY
    assert len(bench.arena.loaded) == 2


def test_two_adapters_that_do_not_fit_together(bench: Bench) -> None:
    bench.ready("a", 3)
    handle = bench.pool.acquire("a")
    bench.pool.require("b")
    bench.answer("b", 3)
    bench.pool.poll()
    assert bench.pool.state("b") is PLACING
    assert bench.released == ["a"]
    bench.ready("small", 1)
    assert bench.pool.state("b") is PLACING
    bench.pool.release(handle)
    bench.pool.poll()
    assert bench.pool.state("b") is COPYING
    assert bench.pool.state("a") is None
    bench.arena.finish()
    bench.pool.poll()
    assert bench.pool.state("b") is READY
    bench.pool.check_integrity()
    with pytest.raises(StaleHandle):
        bench.pool.release(handle)


def test_waiting_for_room_does_not_search_again_until_something_changed(bench: Bench) -> None:
    bench.ready("a", 3)
    handle = bench.pool.acquire("a")
    bench.pool.require("b")
    bench.answer("b", 3)
    asked: list[str] = []
    slots = bench.pool._slots
    reserve = slots.reserve
    slots.reserve = lambda digest, *rest: asked.append(digest) or reserve(digest, *rest)  # type: ignore[method-assign]
    for _ in range(5):
        bench.pool.poll()
    assert asked == ["b"]
    bench.pool.release(handle)
    bench.pool.poll()
    assert asked == ["b", "b"]


def test_too_large_for_the_arena_fails_alone(bench: Bench) -> None:
    bench.ready("a")
    bench.pool.require("huge")
    bench.answer("huge", 5)
    bench.pool.poll()
    assert bench.pool.state("huge") is FAILED
    error = bench.pool.error("huge")
    assert isinstance(error, AdapterMemory)
    assert "--adapter-memory" in error.message
    assert bench.released == ["a", "huge"]
    assert bench.pool.state("a") is READY


def test_everything_pinned(bench: Bench) -> None:
    bench.ready("a", 4, pinned=True)
    bench.pool.require("b")
    bench.answer("b", 1)
    bench.pool.poll()
    assert bench.pool.state("b") is FAILED
    error = bench.pool.error("b")
    assert isinstance(error, AdapterMemory)
    assert "loraplex adapter unload NAME" in error.message
    assert error.retry_after == 5.0
    bench.now += 4.9
    assert bench.pool.require("b") is FAILED
    bench.pool.begin_unload("a")
    bench.ready("b", 1)


def test_want_of_host_memory_is_no_failure_as_long_as_more_may_come(bench: Bench) -> None:
    bench.pool.require("a")
    bench.pool.on_acquire_failed(AcquireFailed("a", AdapterMemory("all in use", retry_after=0.5).record()))
    assert bench.pool.state("a") is None
    assert bench.pool.require("a") is ACQUIRING
    bench.pool.on_acquire_failed(AcquireFailed("a", AdapterMemory("smaller than the adapter").record()))
    assert bench.pool.require("a") is FAILED
    assert bench.acquired == ["a", "a"]


def test_a_pin_waits_with_the_load_and_belongs_to_the_digest(bench: Bench) -> None:
    bench.pool.load("a", pinned=True)
    bench.answer("a")
    bench.pool.poll()
    bench.pool.load("a", pinned=True)
    bench.arena.finish()
    bench.pool.poll()
    assert bench.pool.residents()[0].pinned
    bench.pool.require("a")
    assert bench.pool.residents()[0].pinned
    bench.ready("b")
    bench.ready("c")
    assert bench.pool.state("a") is READY


def test_a_pin_ends_by_unload_only(bench: Bench) -> None:
    bench.ready("a", 4, pinned=True)
    bench.pool.load("a", pinned=False)
    assert bench.pool.residents()[0].pinned
    bench.pool.require("b")
    bench.answer("b", 1)
    bench.pool.poll()
    assert (bench.pool.state("a"), bench.pool.state("b")) == (READY, FAILED)
    bench.pool.check_integrity()
    bench.pool.begin_unload("a")
    bench.ready("a", 4)
    assert not bench.pool.residents()[0].pinned


def test_a_pin_asked_for_during_a_load_survives_another_load(bench: Bench) -> None:
    bench.pool.load("a", pinned=True)
    bench.ready("a")  # loads it once more, without a pin
    assert bench.pool.residents()[0].pinned


def test_nobodys_pin_ends_anothers(bench: Bench) -> None:
    bench.pool.load("a", pinned=True, owner="registry")
    bench.ready("a", pinned=True)
    bench.ready("b")
    bench.pool.load("b", pinned=True, owner="registry")

    def pinned_by() -> dict[str, tuple[PinOwner, ...]]:
        bench.pool.check_integrity()
        return {resident.digest: resident.pinned_by for resident in bench.pool.residents()}

    assert pinned_by() == {"a": ("operator", "registry"), "b": ("registry",)}
    bench.pool.keep_pins("registry", {"b", "unknown"})
    assert pinned_by() == {"a": ("operator",), "b": ("registry",)}
    bench.pool.keep_pins("registry", frozenset())
    assert pinned_by() == {"a": ("operator",), "b": ()}
    bench.pool.keep_pins("operator", frozenset())
    assert pinned_by() == {"a": (), "b": ()}


def test_a_pin_that_is_not_kept_does_not_come_with_a_later_load(bench: Bench) -> None:
    """Of an adapter that never arrived."""
    bench.pool.load("a", pinned=True, owner="registry")
    bench.pool.on_acquire_failed(AcquireFailed("a", AdapterInvalid("broken").record()))
    bench.pool.keep_pins("registry", frozenset())
    bench.now += 60
    bench.ready("a")
    assert not bench.pool.residents()[0].pinned


def test_unload_of_an_idle_adapter_frees_it_at_once(bench: Bench) -> None:
    bench.ready("a", pinned=True)
    assert bench.pool.begin_unload("a") is None
    assert bench.arena.loaded == {}
    bench.pool.check_integrity()
    assert bench.pool.begin_unload("a") is None
    bench.ready("a")
    assert not bench.pool.residents()[0].pinned


def test_unload_drains(bench: Bench) -> None:
    bench.ready("a", pinned=True)
    first, second = bench.pool.acquire("a"), bench.pool.acquire("a")
    assert bench.pool.begin_unload("a") is DRAINING
    assert bench.pool.require("a") is DRAINING
    assert bench.pool.begin_unload("a") is DRAINING
    with pytest.raises(KeyError):
        bench.pool.acquire("a")
    assert bench.pool.residents()[0].active_requests == 2
    bench.pool.release(first)
    assert bench.pool.state("a") is DRAINING
    bench.pool.check_integrity()
    bench.pool.release(second)
    assert bench.pool.state("a") is None
    assert bench.arena.loaded == {}
    assert bench.pool.require("a") is ACQUIRING


def test_an_unload_that_nobody_waits_for_any_more(bench: Bench) -> None:
    bench.ready("a", pinned=True)
    handle = bench.pool.acquire("a")
    bench.pool.begin_unload("a")
    bench.pool.cancel_unload("a")
    assert bench.pool.acquire("a") == handle
    bench.pool.release(handle)
    bench.pool.release(handle)
    assert bench.pool.state("a") is READY
    assert not bench.pool.residents()[0].pinned
    bench.pool.begin_unload("a")
    bench.pool.cancel_unload("a")
    assert bench.pool.state("a") is None
    bench.pool.check_integrity()


def test_unload_while_acquiring(bench: Bench) -> None:
    bench.pool.require("a")
    assert bench.pool.begin_unload("a") is ACQUIRING
    bench.answer("a")
    assert bench.pool.state("a") is None
    assert bench.released == ["a"]
    bench.pool.require("b")
    bench.pool.begin_unload("b")
    bench.fail("b")
    assert bench.pool.state("b") is None


def test_unload_while_placing(bench: Bench) -> None:
    bench.pool.require("a")
    bench.answer("a")
    assert bench.pool.begin_unload("a") is None
    assert bench.released == ["a"]
    bench.pool.poll()
    bench.pool.check_integrity()


def test_unload_while_copying(bench: Bench) -> None:
    bench.pool.require("a")
    bench.answer("a")
    bench.pool.poll()
    assert bench.pool.begin_unload("a") is COPYING
    bench.pool.poll()
    assert bench.released == []
    bench.arena.finish()
    bench.pool.poll()
    assert bench.pool.state("a") is None
    assert bench.released == ["a"]
    assert bench.arena.loaded == {}
    bench.pool.check_integrity()


def test_wanted_again_before_the_unload_took_hold(bench: Bench) -> None:
    bench.pool.require("a")
    bench.pool.begin_unload("a")
    assert bench.pool.require("a") is ACQUIRING
    bench.answer("a")
    bench.pool.poll()
    bench.pool.begin_unload("a")
    assert bench.pool.require("a") is COPYING
    bench.arena.finish()
    bench.pool.poll()
    assert bench.pool.state("a") is READY
    assert bench.acquired == ["a"]


def test_unload_of_a_failure_forgets_it(bench: Bench) -> None:
    bench.pool.require("a")
    bench.fail("a")
    assert bench.pool.begin_unload("a") is None
    assert bench.pool.require("a") is ACQUIRING


def test_a_blob_nobody_waits_for_goes_back(bench: Bench) -> None:
    bench.answer("a")
    bench.fail("a")
    assert bench.released == ["a"]
    assert bench.pool.state("a") is None


def test_a_copy_that_is_refused_fails_alone(bench: Bench) -> None:
    bench.ready("a")
    bench.arena.error = AdapterInvalid("the blob holds float16, the adapter arena float32")
    bench.pool.require("b")
    bench.answer("b")
    bench.pool.poll()
    assert bench.pool.state("b") is FAILED
    error = bench.pool.error("b")
    assert isinstance(error, AdapterInvalid)
    assert error.retry_after is None, "remembered, yet no retry helps"
    assert bench.released == ["a", "b"]
    bench.pool.check_integrity()
    assert bench.pool.state("a") is READY


def test_an_adapter_in_use_moves_for_another_that_needs_its_room_in_one_piece(bench: Bench) -> None:
    pool = bench.pool
    for digest in "abc":
        bench.ready(digest, 1)
    handle = pool.acquire("b")
    pool.begin_unload("a")
    bench.ready("d", 3)  # c, unused, goes; b, in use, moves
    assert (pool.state("b"), pool.state("c"), pool.state("d")) == (READY, None, READY)
    assert bench.arena.loaded[handle.slot] == (0,)
    pool.check(handle)
    counters = pool.counters
    assert (counters.moves, counters.moved_bytes) == (1, UNIT)
    assert counters.evictions == {"bytes": 1, "unload": 1}
    assert counters.needless_reloads == 0
    pool.check_integrity()


def test_a_copy_under_way_is_waited_for_before_its_neighbours_move(bench: Bench) -> None:
    pool = bench.pool
    bench.ready("a", 1)
    pool.require("b")
    bench.answer("b", 1)
    pool.poll()
    assert pool.state("b") is COPYING
    pool.begin_unload("a")
    pool.require("c")
    bench.answer("c", 3)
    pool.poll()
    assert (pool.state("b"), pool.state("c")) == (COPYING, PLACING)
    assert pool.is_moving
    bench.arena.finish()
    pool.poll()
    pool.poll()
    assert (pool.state("b"), pool.state("c")) == (READY, COPYING)
    assert bench.arena.loaded == {1: (0,), 0: (UNIT,)}
    pool.check_integrity()


def test_an_unload_ends_the_making_of_room(bench: Bench) -> None:
    pool = bench.pool
    bench.ready("a", 1)
    pool.require("b")
    bench.answer("b", 1)
    pool.poll()
    pool.begin_unload("a")
    pool.require("c")
    bench.answer("c", 3)
    pool.poll()
    pool.require("d")
    bench.answer("d", 1)
    pool.poll()
    assert pool.state("d") is PLACING
    pool.begin_unload("c")
    pool.poll()
    assert pool.state("d") is COPYING


def test_what_waiting_requests_want_is_not_evicted_for_others(bench: Bench) -> None:
    """Two adapters take turns only when the first one's requests are gone: each load serves somebody."""
    pool = bench.pool
    bench.ready("a", 4)
    pool.require("a")
    pool.require("b")
    bench.answer("b", 4)
    for _ in range(3):
        pool.poll()
        assert (pool.require("a"), pool.require("b")) == (READY, PLACING)
    pool.poll()
    pool.require("b")
    pool.poll()
    assert (pool.state("a"), pool.state("b")) == (None, COPYING)
    assert pool.counters.needless_reloads == 0


def test_only_so_many_blobs_are_held_for_adapters_without_room(bench: Bench) -> None:
    pool = bench.pool
    digests = [f"d{i}" for i in range(MAX_AHEAD + 3)]
    states = [pool.require(digest) for digest in digests]
    assert states == [ACQUIRING] * MAX_AHEAD + [WANTED] * 3
    assert bench.acquired == digests[:MAX_AHEAD]
    assert pool.state(digests[-1]) is None
    bench.fail("d0")
    assert [pool.require(digest) for digest in digests[-3:]] == [ACQUIRING, WANTED, WANTED]
    for digest in digests[1:5]:
        bench.answer(digest, 1)
    pool.poll()
    assert [pool.state(digest) for digest in digests[1:5]] == [COPYING, COPYING, COPYING, PLACING]
    assert [pool.require(digest) for digest in digests[-2:]] == [ACQUIRING, ACQUIRING]
    pool.check_integrity()


def test_a_stale_handle_is_noticed_before_anything_is_computed_with_it(bench: Bench) -> None:
    bench.ready("a")
    handle = bench.pool.acquire("a")
    bench.pool.check(handle)
    bench.pool.release(handle)
    bench.pool.begin_unload("a")
    with pytest.raises(StaleHandle):
        bench.pool.check(handle)
    bench.ready("b")
    assert bench.pool.acquire("b").slot == handle.slot
    with pytest.raises(StaleHandle):
        bench.pool.check(handle)


def test_a_load_is_timed_by_phase_and_shows_its_progress(bench: Bench) -> None:
    pool = bench.pool
    pool.want([Wanted("a", "", prepare_seconds=8.0)])
    bench.now += 1
    assert pool.loads_in_flight() == [LoadInFlight("a", "ACQUIRING", 0.0, 9.0)]
    bench.answer("a", 1)
    bench.now += 2
    pool.poll()
    bench.now += 4
    assert pool.loads_in_flight() == [LoadInFlight("a", "COPYING", 0.75, 15.0, 192, 256)]
    bench.arena.finish()
    pool.poll()
    assert pool.loads_in_flight() == []
    assert {phase: (s.sum, s.count) for phase, s in pool.counters.load_seconds.items()} == {
        "prepare": (8.0, 1), "acquire": (1.0, 1), "place": (2.0, 1), "copy": (4.0, 1), "total": (15.0, 1),
    }  # fmt: skip
    pool.load("a", pinned=True)
    assert pool.memory() == (Usage(256, 1024), 256, 0, Usage(1, 3))


class PoolMachine(RuleBasedStateMachine):
    """Random life of six adapters of different sizes: blobs are neither lost nor given back twice."""

    digests = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.pool = self.bench.pool
        self.asked: list[str] = []
        self.blobs = 0
        self.held: list[Handle] = []

    def pending(self) -> list[str]:
        self.asked += self.bench.acquired
        self.bench.acquired.clear()
        return self.asked

    @rule(digest=digests)
    def require(self, digest: str) -> None:
        if self.pool.require(digest) is READY:
            self.held.append(self.pool.acquire(digest))

    @rule(digest=digests, pinned=st.booleans(), owner=st.sampled_from(["operator", "registry"]))
    def load(self, digest: str, pinned: bool, owner: PinOwner) -> None:
        self.pool.load(digest, pinned, owner)

    @rule(kept=st.sets(digests))
    def keep_pins(self, kept: set[str]) -> None:
        self.pool.keep_pins("registry", kept)

    @rule(digest=digests)
    def unload(self, digest: str) -> None:
        self.pool.begin_unload(digest)

    @rule(digest=digests)
    def cancel_unload(self, digest: str) -> None:
        self.pool.cancel_unload(digest)

    @precondition(lambda self: self.pending())
    @rule(fails=st.integers(0, 4))
    def reply(self, fails: int) -> None:
        digest = self.asked.pop(0)
        if not fails:
            self.bench.fail(digest)
            return
        self.blobs += 1
        self.bench.answer(digest, 1 + "abcdef".index(digest) % 5)

    @rule(finish=st.booleans())
    def poll(self, finish: bool) -> None:
        if finish:
            self.bench.arena.finish()
        self.pool.poll()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def wait(self) -> None:
        self.bench.now += 4

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        states = [self.pool.state(digest) for digest in "abcdef"]
        assert self.blobs - len(self.bench.released) == states.count(PLACING) + states.count(COPYING)
        assert len(self.pending()) == states.count(ACQUIRING)
        assert self.bench.arena.loaded == {
            r.handle.slot: tuple(chunk.start for chunk in r.ranges) for r in self.pool._slots.residents()
        }
        assert not self.pool.counters.needless_reloads
        assert len(self.bench.arena.loaded) == len([s for s in states if s in (COPYING, READY, DRAINING)])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
