"""Regular expressions that tenants wrote, matched against module names without the backtracking that can hang.

Python's own engine takes exponential time on `(a+)+$`. Patterns of nothing but names and dots go to it, as they cannot
backtrack much. All others are parsed by Python's parser (so the syntax is exactly `re`'s) and run as set operations:
every node maps the set of positions where it may start to the set of positions where it may end. That answers the
yes-or-no questions asked here exactly, in polynomial time, and each step is paid from a budget, so that no adapter
can hold a registry up.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shared.adapter_format.reasons import key_invalid, key_unsupported
from shared.errors import AdapterInvalid, UnsupportedAdapter

MAX_PATTERN_LENGTH = 2000
MAX_NESTING = 40
STEPS_PER_ADAPTER = 4_000_000

_sre: Any = importlib.import_module("re._parser")
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")

Positions = frozenset[int]
_NOWHERE: Positions = frozenset()

_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda c: not c.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda c: not c.isspace(),
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
    "CATEGORY_NOT_WORD": lambda c: not (c.isalnum() or c == "_"),
}
_CHARACTER_NODES = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_ANCHORS = ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING", "AT_BOUNDARY", "AT_NON_BOUNDARY")


class StepBudget:
    """Matching steps that one adapter may still take."""

    def __init__(self, steps: int = STEPS_PER_ADAPTER) -> None:
        self.left = steps

    def spend(self, steps: int, key: str) -> None:
        """Take `steps`; raises AdapterInvalid naming the config key whose pattern was running when none are left."""
        self.left -= steps
        if self.left < 0:
            raise key_invalid(key, "holds patterns that take too long to match", "write simpler ones")


class NamePattern:
    """One pattern from config key `key`.

    Args:
        source: The tenant's pattern.
        form: What PEFT builds around it, with `{}` for the pattern.
        whole: Match the whole name (`re.fullmatch`), else a prefix of it (`re.match`).

    Raises:
        AdapterInvalid: too long, nested too deeply or not a regular expression.
        UnsupportedAdapter: uses back references, conditionals, atomic groups or inline flags.
    """

    def __init__(self, source: str, key: str, form: str = "{}", whole: bool = True) -> None:
        self.key = key
        self.whole = whole
        if len(source) > MAX_PATTERN_LENGTH:
            raise key_invalid(
                key, f"holds a pattern of {len(source)} characters", f"write at most {MAX_PATTERN_LENGTH}"
            )
        text = form.replace("{}", source)
        self._plain = re.compile(text) if _PLAIN.fullmatch(source) else None
        self._nodes = () if self._plain else _parse(text, source, key)

    def matches(self, name: str, budget: StepBudget) -> bool:
        """Whether the pattern matches `name`, a module path (one line)."""
        if self._plain:
            budget.spend(1, self.key)
            return bool(self._plain.fullmatch(name) if self.whole else self._plain.match(name))
        ends = _Walk(name, budget, self.key).sequence(self._nodes, frozenset((0,)))
        return len(name) in ends if self.whole else bool(ends)


def _parse(text: str, source: str, key: str) -> Sequence[Any]:
    try:
        tree = _sre.parse(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise _no_pattern(source, key, error) from None
    if tree.state.flags & ~re.UNICODE:
        raise _flags(source, key)
    _check(tree, source, key, 0)
    return tuple(tree)


def _flags(source: str, key: str) -> UnsupportedAdapter:
    return key_unsupported(key, f"inline flags in {source!r:.100} are not supported; spell the letters out")


def _no_pattern(source: str, key: str, error: Exception) -> AdapterInvalid:
    """`error` came of what PEFT builds around `source`: its position would mean nothing to who wrote that."""
    try:
        _sre.parse(source)
    except (re.error, OverflowError, RecursionError, Warning) as alone:
        return key_invalid(key, f"holds {source!r:.100}, no regular expression: {alone!s:.100}", "correct it")
    if "global flags" in str(error):
        problem = f"holds {source!r:.100}, whose flags PEFT cannot load: it puts the pattern behind a prefix"
        return key_invalid(key, problem, "remove them, and write each letter in both forms, [Qq]")
    return key_invalid(key, f"holds {source!r:.100}, which PEFT's prefix makes wrong: {error!s:.100}", "correct it")


def _check(nodes: Iterable[Any], source: str, key: str, depth: int) -> None:
    """Every node below must be one that `_Walk` knows."""
    if depth > MAX_NESTING:
        raise key_invalid(key, f"holds {source!r:.100}, which is nested too deeply", "write a simpler one")
    for op, argument in nodes:
        match op.name:
            case "BRANCH":
                children = argument[1]
            case "MAX_REPEAT" | "MIN_REPEAT":
                children = [argument[2]]
            case "SUBPATTERN" if argument[1] or argument[2]:
                raise _flags(source, key)
            case "SUBPATTERN":
                children = [argument[3]]
            case "ASSERT" | "ASSERT_NOT":
                children = [argument[1]]
                if argument[0] < 0 and len(set(argument[1].getwidth())) > 1:
                    raise key_invalid(key, f"holds {source!r:.100}", "give its lookbehind a fixed width")
            case "AT" if argument.name in _ANCHORS:
                children = []
            case name if name in _CHARACTER_NODES:
                children = []
            case name:
                what = name.lower().replace("_", " ")
                raise key_unsupported(
                    key, f"{what} in {source!r:.100} is not supported; write a plain pattern or a list"
                )
        for child in children:
            _check(child, source, key, depth + 1)


class _Walk:
    """Matching over one name. Each method maps start positions to end positions."""

    def __init__(self, name: str, budget: StepBudget, key: str) -> None:
        self.name = name
        self.budget = budget
        self.key = key

    def sequence(self, nodes: Iterable[Any], starts: Positions) -> Positions:
        for op, argument in nodes:
            if not starts:
                return _NOWHERE
            self.budget.spend(1 + len(starts), self.key)
            starts = self._node(op.name, argument, starts)
        return starts

    def _node(self, op: str, argument: Any, starts: Positions) -> Positions:
        match op:
            case "BRANCH":
                self.budget.spend(len(argument[1]), self.key)
                return _NOWHERE.union(*(self.sequence(branch, starts) for branch in argument[1]))
            case "SUBPATTERN":
                return self.sequence(argument[3], starts)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(argument[0], argument[1], argument[2], starts)
            case "AT":
                return frozenset(start for start in starts if self._is_at(argument.name, start))
            case "ASSERT" | "ASSERT_NOT" if argument[0] < 0:  # behind, where every match has one width
                width = argument[1].getwidth()[0]
                return frozenset(s for s in starts if self._ends_at(argument[1], s - width, s) == (op == "ASSERT"))
            case "ASSERT" | "ASSERT_NOT":
                wanted = op == "ASSERT"
                return frozenset(s for s in starts if bool(self.sequence(argument[1], frozenset((s,)))) == wanted)
        if op == "IN":
            self.budget.spend(len(starts) * len(argument), self.key)
        return frozenset(s + 1 for s in starts if s < len(self.name) and _is_in(op, argument, self.name[s]))

    def _ends_at(self, nodes: Iterable[Any], start: int, end: int) -> bool:
        return start >= 0 and end in self.sequence(nodes, frozenset((start,)))

    def _repeat(self, least: int, most: int, body: Sequence[Any], starts: Positions) -> Positions:
        """Between `least` and `most` times. Both loops end early: positions only grow, up to the end of the name."""
        if least == 0 and most == _sre.MAXREPEAT and len(body) == 1 and body[0][0].name in _CHARACTER_NODES:
            return self._run(body[0][0].name, body[0][1], starts)
        for _ in range(least):
            following = self.sequence(body, starts)
            if following == starts:
                break
            starts = following
        reached = frontier = starts
        for _ in range(most - least):
            frontier = self.sequence(body, frontier) - reached
            if not frontier:
                break
            reached |= frontier
        return reached

    def _run(self, op: str, argument: Any, starts: Positions) -> Positions:
        """Any number of one kind of character: the most common repeat, in one sweep over the name."""
        first = min(starts)
        weight = len(argument) if op == "IN" else 1
        self.budget.spend((len(self.name) - first) * weight, self.key)
        reached = set(starts)
        for position in range(first, len(self.name)):
            if position in reached and _is_in(op, argument, self.name[position]):
                reached.add(position + 1)
        return frozenset(reached)

    def _is_at(self, anchor: str, position: int) -> bool:
        if anchor.startswith("AT_BEGINNING"):
            return position == 0
        if anchor.startswith("AT_END"):
            return position == len(self.name)
        is_word = _CATEGORIES["CATEGORY_WORD"]
        before = position > 0 and is_word(self.name[position - 1])
        after = position < len(self.name) and is_word(self.name[position])
        return (before != after) == (anchor == "AT_BOUNDARY")


def _is_in(op: str, argument: Any, character: str) -> bool:
    """Whether a node that takes one character takes this one."""
    match op:
        case "LITERAL":
            return bool(argument == ord(character))
        case "NOT_LITERAL":
            return bool(argument != ord(character))
        case "ANY":
            return character != "\n"
        case "RANGE":
            return bool(argument[0] <= ord(character) <= argument[1])
        case "CATEGORY":
            return _CATEGORIES[argument.name](character)
    negate = bool(argument) and argument[0][0].name == "NEGATE"
    return negate != any(_is_in(item.name, value, character) for item, value in argument[negate:])
