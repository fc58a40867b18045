from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.weighted_choice import choose

KEYS = [f"session-{i}" for i in range(4000)]


def test_shares_follow_the_weights():
    counts = Counter(choose("uid", "prod", key, [(1, 90), (2, 10), (3, 0)]) for key in KEYS)
    assert 3 not in counts
    assert 0.08 < counts[2] / len(KEYS) < 0.12


def test_a_changed_weight_moves_keys_only_to_the_version_that_gained():
    before = [choose("uid", "prod", key, [(1, 50), (2, 50)]) for key in KEYS]
    after = [choose("uid", "prod", key, [(1, 50), (2, 100)]) for key in KEYS]
    assert {pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]} == {(1, 2)}


@pytest.mark.parametrize("weights", [(99, 1), (1, 2, 4), (1e-3, 1e3)])
def test_shares_are_within_a_point_over_100_000_keys(weights):
    counts = Counter(choose("uid", "prod", f"session-{n}", list(enumerate(weights))) for n in range(100_000))
    for version, weight in enumerate(weights):
        assert abs(counts[version] / 100_000 - weight / sum(weights)) < 0.01


def test_a_changed_weight_moves_no_more_than_it_must():
    before = [choose("uid", "prod", f"{n}", [(1, 9), (2, 1)]) for n in range(40_000)]
    after = [choose("uid", "prod", f"{n}", [(1, 7), (2, 3)]) for n in range(40_000)]
    moved = Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    assert set(moved) == {(1, 2)}
    assert abs(moved[1, 2] / 40_000 - 0.2) < 0.01


@given(
    st.dictionaries(st.integers(1, 20), st.floats(1e-3, 1e3), min_size=2, max_size=6), st.floats(1e-3, 1e3), st.data()
)
def test_only_keys_of_the_version_whose_weight_changes_move(weights, weight, data):
    changed = data.draw(st.sampled_from(sorted(weights)))
    for n in range(50):
        before = choose("uid", "prod", f"{n}", list(weights.items()))
        after = choose("uid", "prod", f"{n}", list({**weights, changed: weight}.items()))
        wanted = {before, changed} if weight >= weights[changed] else {before} if before != changed else set(weights)
        assert after in wanted


def test_every_part_of_the_key_counts():
    targets = [(version, 1.0) for version in range(50)]
    chosen = [choose("u", "a", f"{key}", targets) for key in range(20)]
    assert chosen != [choose("v", "a", f"{key}", targets) for key in range(20)]
    assert chosen != [choose("u", "b", f"{key}", targets) for key in range(20)]


def test_known_answers():
    """A change here would move every caller's canary assignment."""
    assert [choose("uid", "prod", f"{key}", [(1, 1), (2, 1)]) for key in range(12)] == KNOWN


KNOWN = [2, 2, 2, 1, 2, 1, 2, 2, 1, 2, 1, 2]


@given(st.text(), st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1e9)), min_size=1, unique_by=lambda t: t[0]))
def test_order_does_not_matter_and_zero_is_never_chosen(key, targets):
    if not any(weight > 0 for _, weight in targets):
        return
    chosen = choose("uid", "prod", key, targets)
    assert chosen == choose("uid", "prod", key, targets[::-1])
    assert dict(targets)[chosen] > 0


@pytest.mark.parametrize("targets", [[], [(1, 0)], [(1, -1.0)], [(1, float("nan"))], [(1, float("inf"))]])
def test_bad_weights(targets):
    with pytest.raises(InvalidArgument, match="targets"):
        choose("uid", "prod", "key", targets)
