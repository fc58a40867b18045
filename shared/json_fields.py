"""Reads typed values out of a JSON object and remembers everything that is wrong, so that it can be told at once."""

import math
from collections.abc import Mapping
from typing import Any

from shared.errors import FieldViolation, InvalidArgument
from shared.json_text import as_json

LARGEST_INT = 1 << 31


class JsonFields:
    """Typed access to one JSON object.

    A wrong or missing key is recorded under `prefix` + key and read as a harmless value; `check()` then raises all of
    them in one `InvalidArgument`. A key that is null counts as absent.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str, violations: list[FieldViolation] | None = None) -> None:
        self.raw = raw
        self.prefix = prefix
        self.violations: list[FieldViolation] = [] if violations is None else violations

    def wrong(self, key: str, description: str) -> None:
        """Record that `key` is wrong."""
        self.violations.append(FieldViolation(self.prefix + key, description))

    def check(self) -> None:
        """Raise `InvalidArgument` with everything recorded so far, if anything was."""
        if self.violations:
            raise InvalidArgument(self.violations)

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = LARGEST_INT) -> int:
        """An int in [low, high]; without a default the key is required."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(
                key,
                "is missing" if value is None else f"must be an integer in [{low}, {high}], is {as_json(value):.80}",
            )
            return low
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero; without a default the key is required."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not _is_positive_number(value):
            self.wrong(key, "is missing" if value is None else f"must be a number above zero, is {as_json(value):.80}")
            return 1.0
        return float(value)  # type: ignore[arg-type]  # a number, as just checked

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, f"must be true or false, is {as_json(value):.80}")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(key, f"must be a string, is {as_json(value):.80}")
            return default
        return value

    def group(self, key: str) -> "JsonFields | None":
        """The object under `key`, recording into the same list; None where there is none or an empty one."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.wrong(key, f"must be an object, is {as_json(value):.80}")
            return None
        return JsonFields(value, f"{self.prefix}{key}.", self.violations) if value else None


def _is_positive_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value < 1e30 and math.isfinite(value)
