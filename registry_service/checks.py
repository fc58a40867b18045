"""Collects what is wrong with a request, so that its caller hears everything at once."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from shared.errors import FieldViolation, InvalidArgument

MAX_LABELS = 64
MAX_LABEL_CHARS = 255
MAX_ANNOTATION_CHARS = 4096
MAX_DESCRIPTION_CHARS = 4096

T = TypeVar("T")

_KEY = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?")


class Checks:
    """Runs checks and keeps what each of them says is wrong."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def wrong(self, field: str, description: str) -> None:
        self.violations.append(FieldViolation(field, description))

    def checked(self, check: Callable[[], T], default: T) -> T:
        try:
            return check()
        except InvalidArgument as error:
            self.violations.extend(error.violations)
            return default

    def pairs(self, field: str, pairs: Mapping[str, str], value_chars: int) -> None:
        """Labels or annotations."""
        if len(pairs) > MAX_LABELS:
            self.wrong(field, f"must not be more than {MAX_LABELS}")
        for key, value in list(pairs.items())[:MAX_LABELS]:
            if not _KEY.fullmatch(key) or not is_text(value, value_chars):
                expected = f"keys are 1 to 63 of A-Z a-z 0-9 . _ / -, values printable and at most {value_chars}"
                self.wrong(f"{field}[{key[:100]!r}]", f"{expected} characters")

    def description(self, field: str, text: str) -> None:
        """Free text, of several lines if need be."""
        if not is_text(text.replace("\n", " ").replace("\t", " "), MAX_DESCRIPTION_CHARS):
            self.wrong(field, f"must be printable, at most {MAX_DESCRIPTION_CHARS} characters")

    def finish(self) -> None:
        """Raises InvalidArgument if anything was wrong."""
        if self.violations:
            raise InvalidArgument(self.violations)


def is_text(text: str, limit: int) -> bool:
    return len(text) <= limit and text.isprintable()
