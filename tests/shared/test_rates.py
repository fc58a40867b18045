"""Token buckets against what they promise, at any times and amounts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.limits import LimitSettings
from shared.rates import FORGET_EVERY, Rate, TenantBuckets, TokenBucket

RATES = st.builds(Rate, per_second=st.floats(0.01, 1000), burst=st.floats(1, 1000))
GAPS = st.floats(0, 100)


@settings(max_examples=150, deadline=None)
@given(RATES, st.lists(st.tuples(GAPS, st.integers(1, 50)), max_size=40))
def test_no_window_lets_in_more_than_burst_rate_and_the_last(rate, calls):
    bucket, now, taken = TokenBucket(rate, 0.0), 0.0, []
    for gap, amount in calls:
        now += gap
        if bucket.wait(now) == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            seconds = taken[last][0] - taken[first][0]
            before_last = sum(amount for _, amount in taken[first:last])
            assert before_last <= rate.burst + seconds * rate.per_second + 1e-6 * (1 + now * rate.per_second)


@settings(max_examples=150, deadline=None)
@given(RATES, st.floats(0, 5000), GAPS)
def test_the_time_told_is_enough_and_half_of_it_is_not(rate, debt, gap):
    bucket = TokenBucket(rate, 0.0)
    bucket.take(debt, gap)
    seconds = bucket.wait(gap)
    assert bucket.wait(gap + seconds) == pytest.approx(0, abs=1e-6)
    if seconds > 1e-3:
        assert bucket.wait(gap + seconds / 2) > 0


@given(RATES, st.lists(GAPS, max_size=30))
def test_who_keeps_to_the_rate_is_never_refused(rate, gaps):
    bucket, now = TokenBucket(rate, 0.0), 0.0
    for gap in gaps:
        now += max(gap, 1.001 / rate.per_second)
        assert bucket.wait(now) == 0
        bucket.take(1, now)


def test_time_that_goes_backwards_gives_nothing():
    bucket = TokenBucket(Rate(1, 2), 10.0)
    bucket.take(2, 10.0)
    assert bucket.wait(5.0) == 1.0
    bucket.take(1, 5.0)
    assert bucket.wait(10.0) == 2.0


def test_tenants_have_their_own_and_the_idle_are_forgotten():
    buckets = TenantBuckets(Rate(1, 1), {"big": Rate(100, 5)})
    for tenant, amount in (("a", 1), ("big", 4)):
        assert buckets.wait(tenant, 0.0) == 0
        buckets.take(tenant, amount, 0.0)
    assert [buckets.wait(tenant, 0.0) for tenant in ("a", "b", "big")] == [1.0, 0.0, 0.0]
    for number in range(10 * FORGET_EVERY):
        buckets.take(f"t{number}", 1, 10.0 * number)
    assert buckets.num_buckets <= FORGET_EVERY
    assert buckets.wait("a", 0.5) == 0  # forgotten when it was full again


def test_without_a_rate_nothing_is_counted():
    buckets = LimitSettings().buckets(0, {"a": 0})
    buckets.take("a", 1e9, 0.0)
    assert (buckets.wait("a", 0.0), buckets.num_buckets) == (0, 0)
    some = LimitSettings(tenant_burst_seconds=0.1).buckets(5, {"a": 50})
    some.take("b", 1, 0.0)  # a burst is one at least
    some.take("a", 4, 0.0)
    assert some.wait("b", 0.0) == pytest.approx(0.2)
    assert some.wait("a", 0.0) == 0
