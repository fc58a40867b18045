"""The page of errors has a section for every reason there is, and none for another."""

import re
from pathlib import Path

from shared.errors import BY_REASON

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def test_every_reason_has_one_section_and_no_section_another_reason() -> None:
    sections = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(BY_REASON)
