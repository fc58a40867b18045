"""Deadlines that cannot be met: what is measured, and that nobody is refused who would have been in time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.engine.wait_estimate import LEAST_STARTS, MARGIN, WINDOW, WaitEstimate
from shared.errors import DeadlineUnreachable
from tests.inference_service.engine.engine_fakes import build_engine, spec

API = b"api-0"


def measured(seconds_each: float, num: int = WINDOW) -> tuple[WaitEstimate, float]:
    """Of starts that came `seconds_each` apart, and the time of the last."""
    waits = WaitEstimate()
    for number in range(num):
        waits.started(number * seconds_each)
    return waits, (num - 1) * seconds_each


@settings(max_examples=100, deadline=None)
@given(st.floats(0.05, 100), st.integers(0, 1000), st.floats(0.01, 1e4))
def test_nobody_is_refused_who_is_in_time_at_twice_the_rate(seconds_each, num_ahead, patience):
    waits, now = measured(seconds_each)
    least = num_ahead * seconds_each / MARGIN * (WINDOW - 1) / WINDOW  # between the first and the last start
    if least < 0.99 * patience:
        waits.check(now + patience, num_ahead, now)
    elif least > 1.01 * patience:
        with pytest.raises(DeadlineUnreachable) as refused:
            waits.check(now + patience, num_ahead, now)
        assert refused.value.retry_after == pytest.approx(least)


def test_without_a_measurement_only_a_deadline_that_has_passed_is_refused():
    few, now = measured(10.0, LEAST_STARTS - 1)
    burst, at = measured(0.0)
    forgotten, then = measured(10.0)
    forgotten.forget()
    for waits, when in ((few, now), (burst, at), (forgotten, then), (WaitEstimate(), 5.0)):
        waits.check(when + 0.001, 1000, when)
        with pytest.raises(DeadlineUnreachable):
            waits.check(when, 0, when)


def test_the_longer_nothing_starts_the_longer_it_takes():
    waits, now = measured(1.0)
    assert waits.seconds(10, now + 100) > 2 * waits.seconds(10, now)


def test_a_queue_refuses_who_would_be_too_late_and_takes_others():
    """One seat, a request of a second each: the queue of one tenant says nothing about another's."""
    engine = build_engine(max_num_seqs=1, max_queue=1000)
    for number in range(3 * LEAST_STARTS):
        engine.submit(API, spec(f"a{number}", [1], 1, arrival=0.0, tenant="a"))
    for second in range(2 * LEAST_STARTS):
        engine.step(float(second))
    now = 2.0 * LEAST_STARTS
    waiting = engine.scheduler.num_waiting
    engine.submit(API, spec("late", [1], 1, arrival=now, deadline=now + waiting / 4, tenant="a"))
    engine.submit(API, spec("patient", [1], 1, arrival=now, deadline=now + 2 * waiting, tenant="a"))
    engine.submit(API, spec("other", [1], 1, arrival=now, deadline=now + 2, tenant="b"))
    (output,) = engine.take_output().values()
    assert [failure.request_id for failure in output.failed] == ["late"]
    assert output.failed[0].error.reason == "DEADLINE_UNREACHABLE"
    assert float(output.failed[0].error.metadata["estimated_wait_seconds"]) > waiting / 4


def test_who_finds_the_queue_full_may_come_back_when_those_in_it_have_started():
    engine = build_engine(max_num_seqs=1, max_queue=3 * LEAST_STARTS)
    for number in range(3 * LEAST_STARTS):
        engine.submit(API, spec(f"a{number}", [1], 1, arrival=0.0))
    engine.submit(API, spec("unmeasured", [1], 1, arrival=0.0))
    (first,) = engine.take_output()[API].failed
    for second in range(2 * LEAST_STARTS):
        engine.step(float(second))
    for number in range(engine.scheduler.limits.max_queue - engine.scheduler.num_waiting):
        engine.submit(API, spec(f"b{number}", [1], 1, arrival=2.0 * LEAST_STARTS))
    engine.submit(API, spec("measured", [1], 1, arrival=2.0 * LEAST_STARTS))
    (last,) = engine.take_output()[API].failed
    assert (first.request_id, last.request_id) == ("unmeasured", "measured")
    for failure in (first, last):
        assert failure.error.reason == "QUEUE_FULL"
        assert failure.error.metadata == {"limit": "queue", "value": str(3 * LEAST_STARTS)}
    assert first.error.retry_after == 1.0
    assert last.error.retry_after == pytest.approx(3 * LEAST_STARTS / MARGIN, rel=0.1)  # one started each second
