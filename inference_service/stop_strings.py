"""Finds the first stop string in a text that arrives in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string and where it begins in the pending text."""

    position: int
    string: str


class StopStrings:
    """Holds back the text that may begin a stop string, and cuts the text before the first one.

    First is the one that begins first; of several that begin there, the one complete first. That does not depend on
    how the text is cut into pieces. Where one complete string lies inside a longer one that is not complete yet, the
    text after tells which it was: until then `candidate` is set and nothing is decided.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._beginnings = frozenset(s[0] for s in strings)
        self._pending = ""
        self.completions = 0  # grows whenever a feed completes a new candidate or match
        self.candidate: Match | None = None
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; returns what can be given out. Once `matched` is set, the text has ended."""
        if not self._pending and self._beginnings.isdisjoint(text):
            return text
        released = ""
        # One character at a time, so that the shortest of several strings from one position wins wherever pieces end.
        for character in text:
            self._pending += character
            released += self._advance()
            if self.matched is not None:
                break
        return released

    def flush(self) -> str:
        """No more text comes: settle a candidate, or give out what was held back."""
        if self.candidate is not None:
            return self._settle(self.candidate)
        released, self._pending = self._pending, ""
        return released

    def _advance(self) -> str:
        """One character was appended: look for a string that ends here, and release what can begin none."""
        ending = self._ending()
        if ending is not None and (self.candidate is None or ending.position < self.candidate.position):
            self.candidate = ending
            self.completions += 1
        opening = self._opening()
        if self.candidate is not None and (opening is None or opening >= self.candidate.position):
            return self._settle(self.candidate)
        keep_from = len(self._pending) if opening is None else opening
        released, self._pending = self._pending[:keep_from], self._pending[keep_from:]
        if self.candidate is not None:
            self.candidate = self.candidate._replace(position=self.candidate.position - keep_from)
        return released

    def _ending(self) -> Match | None:
        """The stop string that ends with the pending text; of several, the longest, which begins first."""
        matches = [Match(len(self._pending) - len(s), s) for s in self._strings if self._pending.endswith(s)]
        return min(matches, default=None)

    def _opening(self) -> int | None:
        """Where the pending text first begins a stop string without completing it."""
        for position in range(len(self._pending)):
            rest = self._pending[position:]
            if any(len(s) > len(rest) and s.startswith(rest) for s in self._strings):
                return position
        return None

    def _settle(self, match: Match) -> str:
        released, self._pending = self._pending[: match.position], ""
        self.candidate, self.matched = None, match.string
        return released
