"""The threat model names a test for every attempt, and each of them exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+|\*)`")
_ATTACKERS = {"tenant", "adapter file", "source", "client", "neighbour"}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(name for name in found if name.startswith("test_"))


def attempts() -> dict[str, list[list[str]]]:
    """The rows of each attacker's table."""
    sections = re.split(r"^## An evil ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    rows = {section.split("\n", 1)[0]: re.findall(r"^\| (?!tries|---)(.*) \|$", section, re.M) for section in sections}
    return {name: [row.split(" | ") for row in found] for name, found in rows.items()}


def test_every_attempt_names_tests_and_all_of_them_exist() -> None:
    missing = []
    for rows in attempts().values():
        for tries, _, shown in rows:
            named = _TEST.findall(shown)
            assert named, f"{tries}: no test"
            assert not _TEST.sub("", shown).strip(), f"{tries}: {shown}"
            for path, name in named:
                if not (ROOT / path).is_file() or (name not in names_in(path) and not (name == "*" and names_in(path))):
                    missing.append(f"{path}::{name}")
    assert not missing


def test_every_kind_of_attacker_is_there() -> None:
    assert {next(a for a in _ATTACKERS if heading.startswith(a)) for heading in attempts()} == _ATTACKERS
    assert all(len(rows) >= 5 for rows in attempts().values())
