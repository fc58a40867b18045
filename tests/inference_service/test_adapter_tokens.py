"""Tokens by adapter: nothing is lost or counted twice while labels are bounded and engines come and go."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapter_tokens import BASE_MODEL, IDLE_SECONDS, OTHER, AdapterTokens
from inference_service.stats import TokenCounts

NAMES = {digest: f"default/{digest}@1" for digest in "abcdef"}  # nothing is known of g


def counted(served: Counter) -> dict[str, TokenCounts]:
    return {digest: TokenCounts(2 * count, count) for digest, count in served.items()}


@given(st.lists(st.tuples(st.sampled_from(["serve", "restart", "wait"]), st.sampled_from(["", *"abcdefg"]))))
def test_every_token_is_under_one_of_few_labels(steps) -> None:
    tokens, served, total, now = AdapterTokens(max_labels=3), Counter(), 0, 0.0
    before: dict[str, int] = {}
    dropped = 0
    for what, digest in steps:
        if what == "restart":
            served.clear()
        elif what == "wait":
            now += IDLE_SECONDS
        else:
            served[digest] += 5
            total += 5
        tokens.update(counted(served), NAMES, now)
        shown = {name: count.generated for name, count in tokens.totals().items()}
        assert len(shown) <= 4
        assert all(shown[name] >= count for name, count in before.items() if name in shown), "a counter fell"
        dropped += sum(count for name, count in before.items() if name not in shown)
        assert sum(shown.values()) + dropped == total
        assert all(count.prompt == 2 * count.generated for count in tokens.totals().values())
        before = shown


def test_labels_are_kept_by_those_who_are_served() -> None:
    tokens, served = AdapterTokens(max_labels=2), Counter({"": 1, "a": 1, "b": 1, "g": 1})
    tokens.update(counted(served), NAMES, 0.0)
    assert {name for name, count in tokens.totals().items() if count.generated} == {BASE_MODEL, "default/a@1", OTHER}
    served[""] += 1
    tokens.update(counted(served), NAMES, IDLE_SECONDS)
    served["b"] += 1
    tokens.update(counted(served), NAMES, IDLE_SECONDS + 1)
    assert tokens.totals()["default/b@1"].generated == 1
    assert "default/a@1" not in tokens.totals()
    assert tokens.totals()[OTHER].generated == 2
