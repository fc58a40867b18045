"""Every kind of adapter computes what PEFT computes, alone and in one batch with all others."""

import pytest

from tests.kinds.bases import BASES
from tests.kinds.blends import BLENDS
from tests.kinds.blends import KIND as BLENDS_KIND
from tests.kinds.cases import CASES, SMOLLM2, default_cases
from tests.kinds.conftest import Worlds
from tests.kinds.report import Report
from tests.kinds.world import MAX_TOKENS, NUM_REQUESTS, Outcome

TOLERANCE = 1e-4  # of a log-probability in float32
MODEL_TOLERANCE = 1e-3  # likewise: transformers differs from itself by 1e-4 on SmolLM2

pytestmark = [
    pytest.mark.timeout(600),
    # PEFT and transformers warn of tied weights, of biases, of their own changes to come.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"),
]


def mark(is_default: bool) -> list[pytest.MarkDecorator]:
    return [] if is_default else [pytest.mark.slow]


# Default runs try every kind on default base models only, one tied and one not; slow ones every case on all.
PAIRS = [
    pytest.param(
        base, case, id=f"{base}-{case}", marks=mark(BASES[base].is_default and case in {*default_cases(base), *BLENDS})
    )
    for base in BASES
    for case in (*CASES, *BLENDS)
    if case in BLENDS or base in CASES[case].bases
]
NAMES = [pytest.param(base, marks=mark(BASES[base].is_default)) for base in BASES]


@pytest.mark.parametrize(("base", "case"), PAIRS)
def test_as_peft(base: str, case: str, world: Worlds, report: Report) -> None:
    check(world(base).outcomes[case], TOLERANCE)
    kind = BLENDS_KIND if case in BLENDS else CASES[case].kind
    report.add(kind, base, case, world(base).outcomes[case].found.worst_logprob)


@pytest.mark.parametrize("base", NAMES)
def test_few_tokens_are_ties(base: str, world: Worlds) -> None:
    """Where the two best tokens are as good as equal, either is right: that may not hide anything."""
    found = [outcome.found for outcome in world(base).outcomes.values()]
    assert sum(one.ties for one in found) <= max(2, sum(one.tokens for one in found) // 100)


def test_default_runs_try_every_kind_tied_and_untied() -> None:
    default = [base for base in BASES if BASES[base].is_default]
    assert {BASES[base].is_tied for base in default} == {False, True}
    for base in default:
        assert {CASES[case].kind for case in default_cases(base)} == {case.kind for case in CASES.values()}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("case", [*SMOLLM2, *BLENDS])
def test_on_a_real_model(case: str, world: Worlds) -> None:
    check(world("smollm2").outcomes[case], MODEL_TOLERANCE)


def check(outcome: Outcome, tolerance: float) -> None:
    assert outcome.refused is None, outcome.refused and outcome.refused.summary
    assert not outcome.failed
    assert not outcome.found.mismatches
    assert outcome.found.tokens == NUM_REQUESTS * MAX_TOKENS
    assert outcome.found.worst_logprob < tolerance
    assert outcome.effect > 0.1, "the case proves nothing"
