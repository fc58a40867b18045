"""The scheduler with the real slot pool, whose copies take some steps: which adapters are loaded, kept and let go."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.lora.adapter import AdapterState
from inference_service.lora.gaps import UNIT
from inference_service.lora.pool import MAX_AHEAD, AdapterPool
from inference_service.lora.slots import SlotTable
from inference_service.types import Acquired, AcquireFailed, BlobLayout, ChunkLayout
from shared.errors import SourceUnavailable
from tests.inference_service.engine.engine_fakes import UniformRunner, build_engine, spec

API = b"api-0"
STEP_SECONDS = 0.006


class SlowCopy:
    bytes_left = 0

    def __init__(self, polls):
        self.polls = polls

    def is_done(self):
        self.polls -= 1
        return self.polls < 0


class FakeArena:
    def __init__(self, copy_polls):
        self.copy_polls = copy_polls

    def load(self, slot, layout, chunk_offsets, host_offset):
        return SlowCopy(self.copy_polls)

    def clear(self, slot):
        pass

    def move(self, moves):
        pass

    def relocate(self, slot, layout, chunk_offsets):
        pass


class Stack:
    """An engine over the real pool. `units`: of the arena; `sizes`: units of an adapter, 1 unless said."""

    def __init__(self, *, units=4, slots=64, sizes=None, copy_polls=1, owner_units=0, num_seqs=8, budget=64, **more):
        self.now, self.num_steps = 0.0, 0
        self.sizes = sizes or {}
        self.asked, self.released, self.broken = [], [], set()
        self.num_copies, self.evicted = 0, []
        self.first, self.sent, self.failed, self.finished = {}, {}, {}, set()
        self.slots = SlotTable(slots, units * UNIT, owner_bytes=owner_units * UNIT)
        self.pool = AdapterPool(
            self.slots, FakeArena(copy_polls), self.asked.append, self.released.append, lambda: self.now
        )
        self.engine = build_engine(
            runner=UniformRunner(), adapters=self.pool, num_blocks=4000, max_num_seqs=num_seqs, budget=budget,
            max_model_len=4000, max_queue=100_000, prefix_caching=False, **more,
        )  # fmt: skip

    @property
    def scheduler(self):
        return self.engine.scheduler

    def submit(self, name, adapter, prompt=8, output=8, tenant="t", **more):
        self.sent[name] = self.now
        self.engine.submit(
            API, spec(name, [1] * prompt, output, adapter=adapter, tenant=tenant, arrival=self.now, **more)
        )

    def answer(self):
        """The adapter process has every blob that was asked for."""
        while self.asked:
            digest = self.asked.pop(0)
            if digest in self.broken:
                error = SourceUnavailable("gone", retry_after=3600.0)
                self.pool.on_acquire_failed(AcquireFailed(digest, error.record()))
                continue
            nbytes = self.sizes.get(digest, 1) * UNIT
            chunk = ChunkLayout(0, 0, nbytes, ())
            self.pool.on_acquired(Acquired(digest, 0, BlobLayout(nbytes, 8, "float32", (chunk,))))

    def step(self):
        """What the engine's loop does in one turn. Returns the digests that left the slots in it."""
        self.answer()
        before = {resident.digest for resident in self.slots.residents()}
        self.pool.poll()
        after = {resident.digest for resident in self.slots.residents()}
        self.num_copies += len(after - before)
        self.evicted = sorted(before - after)
        for output in self.engine.step(self.now).values():
            for failure in output.failed:
                self.failed[failure.request_id] = failure.error
            for delta in output.deltas:
                self.first.setdefault(delta.request_id, self.now - self.sent[delta.request_id])
                if delta.finish_reason:
                    self.finished.add(delta.request_id)
        self.scheduler.check_integrity()
        self.pool.check_integrity()
        self.now += STEP_SECONDS
        self.num_steps += 1
        return self.evicted

    def waiting(self):
        return {flow.digest for flow in self.scheduler._queue.waiting if flow.digest}

    def run(self, max_steps=20_000):
        for _ in range(max_steps):
            self.step()
            if not self.scheduler.has_work:
                return
        raise AssertionError("starved")


def test_of_a_thousand_adapters_only_as_many_are_asked_for_as_fit():
    stack = Stack(units=32, num_seqs=64, budget=512)
    for number in range(1000):
        stack.submit(f"r{number}", f"a{number}")
    stack.step()
    assert stack.asked == [f"a{number}" for number in range(MAX_AHEAD)][: len(stack.asked)]
    assert len(stack.asked) <= min(32, MAX_AHEAD)
    while stack.scheduler.has_work:
        waiting = stack.waiting()
        assert not waiting & set(stack.step())
        assert len(stack.pool.loads_in_flight()) <= 32
    assert len(stack.finished) == 1000
    assert stack.num_copies == 1000
    order = [int(name[1:]) for name in stack.first]
    assert all(abs(place - number) < 64 for place, number in enumerate(order)), "not in the order of arrival"


def serve(stack, num_adapters, weights, rate, steps, tenants=1):
    """Random arrivals over so many adapters; checks every step that no adapter goes that a request waits for."""
    chosen, count = random.Random(7), 0
    while stack.num_steps < steps or stack.scheduler.has_work:
        if stack.num_steps < steps and chosen.random() < rate:
            adapter = chosen.choices(range(num_adapters), weights)[0]
            stack.submit(f"r{count}", f"a{adapter}", 128, 24, tenant=f"t{adapter % tenants}")
            count += 1
        waiting = stack.waiting()
        assert not waiting & set(stack.step()), "a needless eviction"
        assert stack.num_steps < 20 * steps
    assert len(stack.finished) == count
    return count


@pytest.mark.parametrize("num_adapters", [64, 1000])
@pytest.mark.parametrize("is_zipf", [False, True])
@pytest.mark.parametrize("tenants", [1, 8])
def test_working_sets_beyond_the_arena_do_not_thrash(num_adapters, is_zipf, tenants):
    stack = Stack(units=32, num_seqs=64, budget=1024)
    weights = [1 / (rank + 1) if is_zipf else 1 for rank in range(num_adapters)]
    count = serve(stack, num_adapters, weights, rate=0.6, steps=300, tenants=tenants)
    assert stack.num_copies <= count, "an adapter was loaded in vain"


def test_a_hot_working_set_that_fits_is_loaded_once():
    stack = Stack(units=32, num_seqs=64, budget=1024)
    serve(stack, 32, [1] * 32, rate=0.6, steps=800)
    assert stack.num_copies == 32


def test_who_waits_for_the_same_adapter_shares_one_load():
    """Two adapters, room for one, and requests for both in turn: each serves all who wait before it goes."""
    stack = Stack(units=1, num_seqs=16, budget=256, copy_polls=3)
    for number in range(40):
        stack.submit(f"r{number}", "xy"[number % 2])
    stack.run()
    assert stack.num_copies <= 4


arrivals = st.lists(
    st.tuples(
        st.integers(0, 40),  # step
        st.integers(0, 9),  # adapter
        st.integers(1, 30),  # prompt
        st.integers(1, 25),  # output
        st.integers(1, 2),  # n
        st.integers(0, 2),  # tenant, where there are several
        st.one_of(st.none(), st.integers(0, 40)),  # aborted after so many steps
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(
    arrivals,
    st.lists(st.integers(1, 3), min_size=10, max_size=10),
    st.integers(3, 8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(2, 4),
    st.booleans(),
)
def test_every_request_ends_whatever_adapters_there_are(
    arrivals, sizes, units, slots, copy_polls, num_seqs, has_tenants
):
    """With fewer slots and bytes than adapters. Of one tenant no adapter is evicted that a request waits for, nor
    loaded again in the step in which it went; several take room from each other."""
    sizes = {f"a{number}": size for number, size in enumerate(sizes)}
    stack = Stack(units=units, slots=slots, sizes=sizes, copy_polls=copy_polls, num_seqs=num_seqs,
                  budget=4096 if not has_tenants else 16, adapter_age_limit=1000.0)  # fmt: skip
    alive = set()
    for step in range(4000):
        for number, (at, adapter, prompt, output, n, tenant, abort) in enumerate(arrivals):
            if at == step:
                stack.submit(f"r{number}", f"a{adapter}", prompt, output, f"t{tenant * has_tenants}", n=n)
                alive.add(f"r{number}")
            if abort is not None and at + abort == step:
                stack.engine.abort(API, f"r{number}")
                alive.discard(f"r{number}")
        waiting = stack.waiting()
        gone = set(stack.step())
        assert has_tenants or not gone & waiting
        assert has_tenants or not gone & set(stack.asked)
        if step > 80 and not stack.scheduler.has_work:
            break
    assert not stack.scheduler.has_work, "starved"
    assert alive <= stack.finished
    assert not stack.failed
    assert not any(resident.references for resident in stack.slots.residents())
    assert len(stack.released) >= stack.num_copies


@pytest.mark.parametrize("num_adapters", [2, 3, 6])
def test_an_adapter_that_waits_too_long_gets_room(num_adapters):
    """Room for one, always in use: after the age limit it admits nobody, and the oldest that waits gets the room."""
    stack = Stack(units=1, adapter_age_limit=0.5)
    count = 0
    for number in range(num_adapters - 1):
        stack.submit(f"old{number}", f"a{number + 1}", output=20)
    while len([name for name in stack.first if name.startswith("old")]) < num_adapters - 1:
        if stack.num_steps % 8 == 0:
            stack.submit(f"hot{count}", "a0", output=40, tenant="hot")
            count += 1
        stack.step()
        assert stack.num_steps < 5000
    longest = max(seconds for name, seconds in stack.first.items() if name.startswith("old"))
    assert longest <= (num_adapters - 1) * (0.5 + 60 * STEP_SECONDS)
    stack.run()
    assert len(stack.finished) == count + num_adapters - 1


def test_the_least_valuable_is_drained_and_no_pinned_one():
    stack = Stack(units=3, num_seqs=64, budget=256, adapter_age_limit=0.1)
    stack.pool.load("pinned", pinned=True)
    for number in range(200):
        if number % 4 == 0:
            stack.submit(f"p{number}", "pinned", output=40)
            stack.submit(f"busy{number}", "busy", output=40)
            stack.submit(f"busier{number}", "busy", output=40)
        if number % 10 == 0:
            stack.submit(f"calm{number}", "calm", output=40)
        if number == 20:
            stack.submit("late", "late")
        gone = stack.step()
        assert not gone or gone == ["calm"]
        if "late" in stack.first:
            break
    assert stack.first["late"] < 0.6
    assert stack.scheduler._needs.drained == set()


def test_the_age_limit_evicts_nobody_while_seats_are_short():
    """Who waits long for a seat gains nothing from having its adapter there sooner."""
    stack = Stack(units=2, num_seqs=2, budget=4096, adapter_age_limit=0.1)
    for number in range(20):
        stack.submit(f"r{number}", f"a{number % 5}", output=60)
    while stack.scheduler.has_work:
        waiting = stack.waiting()
        assert not waiting & set(stack.step())
    assert stack.num_copies <= 10


@pytest.mark.parametrize(("num_seqs", "tenant"), [(4, "flood"), (4, "other"), (64, "flood")])
def test_a_larger_adapter_is_not_passed_for_ever(num_seqs, tenant):
    """Three of six others fit and are always in use, it takes the room of two; with four seats these are short too."""
    age_limit, answer = 0.5, 20 * STEP_SECONDS
    sizes = {f"a{number}": 4 for number in range(6)} | {"large": 6}
    stack = Stack(units=13, sizes=sizes, num_seqs=num_seqs, budget=4096, adapter_age_limit=age_limit)
    chosen, num_sent, num_asked, idle_steps = random.Random(2), 0, 0, 0
    while len(stack.finished & {"large0", "large1", "large2"}) < 3:
        while num_sent - sum(name[0] == "f" for name in stack.finished) < 30:
            stack.submit(f"f{num_sent}", f"a{chosen.randrange(6)}", 30, 16, tenant="flood")
            num_sent += 1
        idle_steps += f"large{num_asked - 1}" in stack.finished or not num_asked
        if idle_steps > 60:
            stack.submit(f"large{num_asked}", "large", 30, 16, tenant=tenant)
            num_asked, idle_steps = num_asked + 1, 0
        stack.step()
        assert stack.num_steps < 5000
    longest = max(seconds for name, seconds in stack.first.items() if name[0] == "l")
    others = [seconds for name, seconds in stack.first.items() if name[0] == "f"]
    # Who waits for a seat as long as others of its tenant is not kept by its adapter.
    seat = age_limit + sum(others) / len(others) if num_seqs == 4 and tenant == "flood" else 0.0
    assert longest <= age_limit + seat + 4 * answer


def test_a_resident_adapter_stays_for_a_request_that_has_just_come():
    stack = Stack(units=1, copy_polls=0)
    stack.submit("x", "x", output=1)
    stack.run()
    stack.submit("y", "y", output=1)
    stack.step()  # asks for y
    stack.submit("again", "x", output=1)
    stack.step()  # y's blob has come, and x is wanted
    assert stack.evicted == []
    stack.run()
    assert stack.num_copies == 2


def test_tenants_take_turns_in_what_is_asked_for():
    stack = Stack(units=4)
    for number in range(20):
        stack.submit(f"a{number}", f"a{number}", tenant="a")
    for number in range(2):
        stack.submit(f"b{number}", f"b{number}", tenant="b")
    stack.step()
    assert stack.asked[:3] == ["a0", "b0", "a1"]


def test_a_tenants_adapters_take_no_more_bytes_than_it_may_have():
    stack = Stack(units=8, owner_units=3, num_seqs=16, sizes={"a2": 2})
    for number in range(12):
        stack.submit(f"a{number}", f"a{number % 6}", tenant="a", output=20)
        stack.submit(f"b{number}", f"b{number % 2}", tenant="b", output=20)
    while stack.scheduler.has_work:
        stack.step()
        owned = Counter()
        for resident in stack.slots.residents():
            owned[resident.owner] += resident.nbytes
        assert max(owned.values(), default=0) <= 3 * UNIT
    assert len(stack.finished) == 24
    assert {resident.digest for resident in stack.slots.residents()} >= {"b0", "b1"}, "a's adapters took b's room"


def test_an_adapter_beyond_its_tenants_bytes_is_refused():
    stack = Stack(units=8, owner_units=3, sizes={"big": 4})
    stack.submit("r", "big")
    stack.submit("s", "small")
    stack.run()
    assert stack.failed["r"].reason == "TENANT_QUOTA"
    assert stack.finished == {"s"}


def test_a_tenant_over_its_bytes_drains_nobody_else():
    stack = Stack(units=8, owner_units=1, num_seqs=32, adapter_age_limit=0.1)
    for number in range(200):
        if number % 8 == 0:
            stack.submit(f"a{number}", "a0", tenant="a", output=40)
            stack.submit(f"b{number}", "b", tenant="b", output=10)
        if number == 20:
            stack.submit("late", "a1", tenant="a")
        stack.step()
        assert "b" not in stack.scheduler._needs.drained
    assert "late" in stack.first


def test_a_broken_adapter_fails_its_requests_and_holds_no_place():
    stack = Stack(units=2)
    stack.broken = {"bad"}
    for number in range(6):
        stack.submit(f"r{number}", ["bad", "x", "y"][number % 3])
    stack.run()
    assert stack.failed.keys() == {"r0", "r3"}
    assert stack.finished == {"r1", "r2", "r4", "r5"}


def test_one_that_is_being_unloaded_is_not_asked_for():
    stack = Stack(units=2)
    stack.submit("x", "x", output=1)
    stack.run()
    stack.scheduler.held_adapters.add("x")
    assert stack.pool.begin_unload("x") is None
    stack.submit("again", "x")
    for _ in range(30):
        stack.step()
    assert stack.pool.state("x") is None
    assert stack.asked == []
    stack.scheduler.held_adapters.clear()
    stack.run()
    assert stack.finished == {"x", "again"}


def test_operators_loads_are_placed_beside_what_requests_want():
    stack = Stack(units=4)
    for number in range(30):
        stack.submit(f"r{number}", f"a{number % 6}", output=20)
    stack.step()
    stack.pool.load("ordered", pinned=False)
    while stack.pool.state("ordered") is not AdapterState.READY:
        stack.step()
        assert stack.scheduler.has_work
    stack.run()
