"""Shares of tenants and adapters, in steps: one `Engine.step` is the unit of time."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_service.engine.fairness import CACHED, OUTPUT, PROMPT
from inference_service.engine.sequence import State
from tests.inference_service.engine.engine_fakes import FakeAdapters, UniformRunner, build_engine, spec

API = b"api-0"
BUDGET = 64
LEAD = PROMPT * BUDGET


def build(*, looks_ahead=False, num_blocks=4000, max_num_seqs=16, prefix_caching=False, **more):
    adapters = FakeAdapters()
    adapters.resident = {"x": 0, "y": 1}
    return build_engine(
        runner=UniformRunner(looks_ahead), adapters=adapters, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
        budget=BUDGET, max_model_len=600, max_queue=10_000, prefix_caching=prefix_caching, **more,
    )  # fmt: skip


def submit(engine, name, tenant, prompt=30, output=100, **more):
    number = sum(map(ord, name)) % 97
    engine.submit(API, spec(name, [number] * prompt, output, tenant=tenant, **more))


def served(engine, tenant, digest=None):
    tenants = engine.scheduler._queue.tenants
    return tenants[tenant].flows[digest].served if digest else tenants[tenant].served


class FirstTokens:
    """Steps from a request's arrival to its first token, by its id."""

    def __init__(self, engine):
        self.engine, self.now = engine, 0
        self.sent, self.steps, self.failed = {}, {}, []

    def submit(self, name, *args, **more):
        self.sent[name] = self.now
        submit(self.engine, name, *args, arrival=float(self.now), **more)

    def step(self):
        for output in self.engine.step(float(self.now)).values():
            self.failed += output.failed
            for delta in output.deltas:
                self.steps.setdefault(delta.request_id, self.now - self.sent[delta.request_id])
        if self.now % 20 == 0:
            self.engine.scheduler.check_integrity()
        self.now += 1


def sporadic(flood, **how):
    """First tokens, in steps, of one tenant's requests that come now and then, beside a flood of `flood` requests."""
    looks_ahead, num_blocks, max_num_seqs, flooder, visitor = (
        how["looks_ahead"], how["num_blocks"], how["max_num_seqs"], how["flooder"], how["visitor"],
    )  # fmt: skip
    engine = build(looks_ahead=looks_ahead, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    clock = FirstTokens(engine)
    for number in range(flood):
        clock.submit(f"flood{number}", flooder[0], adapter=flooder[1])
    for step in range(400):
        if step >= 10 and step % 13 == 0:
            clock.submit(f"visit{step}", visitor[0], 25, 15, adapter=visitor[1])
        clock.step()
    assert not clock.failed
    return [steps for name, steps in clock.steps.items() if name.startswith("visit")]


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(
    ("flooder", "visitor"),
    [
        (("flood", None), ("visit", None)),
        (("flood", "x"), ("visit", "y")),
        (("flood", "x"), ("visit", "x")),
        (("same", "x"), ("same", "y")),
        (("same", None), ("same", "y")),
    ],
)
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(4000, 16), (160, 16), (4000, 64)])
def test_a_flood_delays_no_other_first_token(looks_ahead, flooder, visitor, num_blocks, max_num_seqs):
    """Seats full, memory full, or the step's tokens full: at most a full prefill step and two decode steps more."""
    how = locals()
    unloaded, loaded = sporadic(0, **how), sporadic(1000, **how)
    assert len(loaded) == len(unloaded) == 30
    assert max(loaded) <= max(unloaded) + 3
    assert sum(loaded) <= sum(unloaded) + len(loaded), "most of them wait for nothing"


def test_many_visitors_beside_a_flood():
    clock = FirstTokens(build())
    for number in range(1000):
        clock.submit(f"flood{number}", "flood")
    for step in range(300):
        if step >= 10 and step % 6 == 0:
            clock.submit(f"visit{step}", f"visitor{step % 5}", 20, 5)
        clock.step()
    visits = [steps for name, steps in clock.steps.items() if name.startswith("visit")]
    assert len(visits) == 48
    assert max(visits) <= 3


sizes = st.tuples(st.integers(1, 120), st.integers(1, 60))


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.booleans(), st.sampled_from([160, 4000]), st.booleans(), st.booleans())
@example((1, 4), (1, 10), False, 160, False, False)
@example((2, 7), (98, 9), True, 160, False, True)
@example((2, 21), (4, 36), False, 160, True, False)
@example((1, 24), (117, 39), False, 160, False, False)
def test_two_that_always_wait_stay_close(first, second, looks_ahead, num_blocks, latecomer, are_tenants):
    """At most 2 leads apart, and the service of the steps that it takes to see that; room is not taken to and fro."""
    engine = build(looks_ahead=looks_ahead, num_blocks=num_blocks)
    names = (("a", None), ("b", None)) if are_tenants else (("t", "x"), ("t", "y"))
    lines = dict(zip(names, (first, second), strict=True))
    step_service = PROMPT * BUDGET + OUTPUT * engine.scheduler.limits.max_num_seqs
    count, apart = 0, []
    for step in range(250):
        for (tenant, digest), (prompt, output) in lines.items():
            if latecomer and step < 60 and (tenant, digest) == names[1]:
                continue
            flow = engine.scheduler._queue.flow(tenant, digest)
            while len(flow.waiting) < 4:
                count += 1
                submit(engine, f"r{count}", tenant, prompt, output, adapter=digest, arrival=float(step))
        engine.step(float(step))
        if step >= 61:
            apart.append(abs(served(engine, *names[0]) - served(engine, *names[1])))
    engine.scheduler.check_integrity()
    assert max(apart) <= 2 * LEAD + 2 * step_service
    assert engine.scheduler.num_preemptions < 100


def test_idle_time_earns_no_more_than_the_credit():
    engine = build()
    submit(engine, "a0", "a", output=1)
    for step in range(10):
        engine.step(float(step))
    for number in range(300):
        submit(engine, f"b{number}", "b")
    for step in range(300):
        engine.step(float(step))
    submit(engine, "a1", "a", output=1)
    assert served(engine, "b") - served(engine, "a") == 2 * LEAD
    submit(engine, "c0", "c")
    assert served(engine, "c") == served(engine, "a")


def test_what_nobody_else_wanted_is_held_against_nobody():
    engine = build(max_num_seqs=4)
    for number in range(3):
        submit(engine, f"a{number}", "a", output=500)
    for step in range(400):
        engine.step(float(step))
    submit(engine, "b0", "b")
    assert served(engine, "a") - served(engine, "b") == 2 * LEAD
    engine.step(400.0)
    for number in range(40):
        submit(engine, f"b{number + 1}", "b", output=500)
    for step in range(30):
        engine.step(401.0 + step)
    assert sum(s.request.spec.tenant == "a" for s in engine.scheduler.running) >= 1


def test_computing_again_is_not_charged_and_cached_tokens_cost_less():
    engine = build(num_blocks=32, prefix_caching=True)
    submit(engine, "a", "a", 33, 20)
    while engine.scheduler.has_work:
        engine.step(0.0)
    assert served(engine, "a") == 33 * PROMPT + 19 * OUTPUT  # the last token is never an input
    submit(engine, "a", "a", 33, 1)
    engine.step(0.0)
    assert served(engine, "a") == 33 * PROMPT + 19 * OUTPUT + 32 * CACHED + PROMPT
    engine = build(num_blocks=24, max_num_seqs=3)
    for name in ("r0", "r1", "r2"):
        submit(engine, name, "a", 20, 40)
    while engine.scheduler.has_work:
        engine.step(0.0)
    assert engine.scheduler.num_preemptions
    assert served(engine, "a") == 3 * (20 * PROMPT + 39 * OUTPUT)


def test_priority_is_within_a_tenant():
    engine = build(max_num_seqs=1)
    for name, tenant, priority in [("a0", "a", 0), ("a9", "a", 9), ("b0", "b", 0), ("b1", "b", 1)]:
        submit(engine, name, tenant, 10, 30, priority=priority, arrival=float(len(name)))
    started = []
    while engine.scheduler.has_work:
        for output in engine.step(0.0).values():
            started += [s.request_id for s in output.started]
    assert started == ["a9", "b1", "a0", "b0"]


def test_a_higher_priority_of_the_same_tenant_is_not_preempted_for_another_adapter():
    engine = build(max_num_seqs=2)
    for number in range(2):
        submit(engine, f"x{number}", "t", 20, 500, adapter="x", priority=1)
    for step in range(300):
        engine.step(float(step))
    submit(engine, "y", "t", adapter="y")
    for step in range(10):
        engine.step(300.0 + step)
    assert engine.scheduler.num_preemptions == 0
    submit(engine, "z", "t", adapter="y", priority=1)
    engine.step(310.0)
    assert engine.scheduler.num_preemptions == 1


def test_the_most_served_tenants_newest_goes_and_nobody_without_a_lead():
    engine = build(max_num_seqs=3)
    for name, tenant, arrival in [("a0", "a", 0.0), ("a1", "a", 1.0), ("b0", "b", 2.0)]:
        submit(engine, name, tenant, 20, 500, arrival=arrival)
    for step in range(5):
        engine.step(float(step))
    before = {s.request.spec.request_id for s in engine.scheduler.running}
    assert before == {"a0", "a1", "b0"}
    for number in range(4):
        submit(engine, f"b{number + 1}", "b", 20, 500, arrival=6.0)
    engine.step(6.0)
    assert engine.scheduler.num_preemptions == 0, "b is behind by less than a lead"
    submit(engine, "c", "c", 20, 500, arrival=7.0)
    newest = next(s for s in engine.scheduler.running if s.request.spec.request_id == "a1")
    while served(engine, "a") - served(engine, "c") < LEAD + min(PROMPT * newest.num_computed, LEAD):
        engine.step(8.0)
        assert engine.scheduler.num_preemptions == 0, "c is behind by no more than a1 costs to compute again"
    engine.step(9.0)
    assert engine.scheduler.num_preemptions == 1
    assert {s.request.spec.request_id for s in engine.scheduler.running} == {"a0", "b0", "c"}


def test_two_floods_take_turns_without_thrashing():
    """Each preemption costs a recomputed prompt: they are few, and the answers come as fast as for one flood."""
    engine, alone = build(), build()
    for number in range(200):
        submit(engine, f"a{number}", "a")
        submit(alone, f"a{number}", "a")
    for step in range(1000):
        if step == 30:
            for number in range(200):
                submit(engine, f"b{number}", "b")
        for some in (engine, alone):
            some.step(float(step))
    assert engine.scheduler.num_preemptions <= 2 * 16
    computed = [sum(length for step in some.runner.lengths for _, length in step) for some in (engine, alone)]
    assert computed[0] <= 1.1 * computed[1]


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_everything_ends(looks_ahead):
    """Preemption back and forth comes to an end, with too little memory for two and three that want it."""
    engine = build(looks_ahead=looks_ahead, num_blocks=40, max_num_seqs=3)
    for number in range(30):
        submit(engine, f"r{number}", "abc"[number % 3], 20 + 3 * number, 40, arrival=float(number))
    requests = list(engine.scheduler.requests.values())
    for step in range(5000):
        engine.step(float(step))
        engine.scheduler.check_integrity()
        if not engine.scheduler.has_work:
            break
    assert all(s.state is State.FINISHED and s.num_output == 40 for r in requests for s in r.sequences)


def test_tenants_that_are_gone_are_forgotten():
    engine = build()
    for number in range(2000):
        submit(engine, f"r{number}", f"t{number}", 60, 1)
        engine.step(float(number))
        engine.step(float(number))
    assert len(engine.scheduler._queue.tenants) < 150
    for first, second in pairwise(engine.scheduler._queue.tenants.values()):
        assert first.number < second.number
