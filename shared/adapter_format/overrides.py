"""rank_pattern and alpha_pattern: the value of the first pattern in file order that matches, as PEFT takes it."""

from collections.abc import Sequence

from shared.adapter_format.patterns import NamePattern, StepBudget

_FORM = r"(.*\.)?({})$"  # what PEFT's get_pattern_key builds around a pattern


class Overrides:
    """The patterns of config key `key`, compiled once and paid from `budget`."""

    def __init__(self, key: str, patterns: Sequence[tuple[str, float]], default: float, budget: StepBudget) -> None:
        self._key = key
        self._entries = [(source, NamePattern(source, key, _FORM, whole=False), value) for source, value in patterns]
        self._default = default
        self._budget = budget
        self._used: set[str] = set()

    def value(self, name: str) -> float:
        """What holds for the module `name`."""
        for source, pattern, value in self._entries:
            if pattern.matches(name, self._budget):
                self._used.add(source)
                return value
        return self._default

    def warnings(self) -> tuple[str, ...]:
        """The patterns that matched no module that was asked for."""
        unused = [source for source, _, _ in self._entries if source not in self._used]
        return tuple(f"{self._key}: {source[:100]!r} applies to no module" for source in unused[:10])
