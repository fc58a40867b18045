"""README's table names every kind that is tried here, and a measured difference that the tests allow."""

import re

import pytest

from tests.kinds.blends import BLENDS
from tests.kinds.blends import KIND as BLENDS_KIND
from tests.kinds.cases import CASES
from tests.kinds.table import BEGIN, END, README, kinds, measured, replaced, rounded_up, table
from tests.kinds.test_kinds import TOLERANCE


def test_readme_is_in_step_with_the_cases() -> None:
    readme = README.read_text()
    text = readme[readme.index(BEGIN) : readme.index(END)]
    worst = dict(re.findall(r"^\| (.+?) \| yes \| (\de-\d+) \|", text, re.M))
    assert list(worst) == kinds()
    assert all(float(value) <= TOLERANCE for value in worst.values())
    assert replaced(readme, table({kind: float(value) for kind, value in worst.items()})) == readme


def test_a_part_of_the_tests_makes_no_table() -> None:
    entries = [{"kind": case.kind, "case": name, "worst": 2e-6} for name, case in CASES.items()]
    with pytest.raises(ValueError, match="two adapters"):
        measured(entries)
    more = [{"kind": BLENDS_KIND, "case": name, "worst": 2e-6 + 1e-7 * n} for n, name in enumerate(BLENDS)]
    assert measured([*entries, *more])[BLENDS_KIND] == more[-1]["worst"]


@pytest.mark.parametrize(("value", "text"), [(2.4e-6, "3e-6"), (1e-5, "1e-5"), (9.9e-7, "1e-6"), (9.2e-6, "1e-5")])
def test_rounded_up(value: float, text: str) -> None:
    assert rounded_up(value) == text
