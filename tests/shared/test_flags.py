"""What a service says of settings and errors that keep it from starting: one line, with what was probably meant."""

from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest

from shared.config import ConfigError, load
from shared.errors import InvalidArgument, LoraplexError, RegistryUnavailable
from shared.flags import startup_error


@dataclass(frozen=True)
class Rates:
    requests_per_second: float = 0.0


@dataclass(frozen=True)
class Few:
    max_model_len: int = 1
    file_roots: dict[str, str] = field(default_factory=dict, metadata={"flag": "--file-root"})
    namespaces: dict[str, Rates] = field(default_factory=dict)


MANY = make_dataclass("Many", [(f"field_{number}", int, 0) for number in range(60)], frozen=True)


def problem(cls: type, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(cls, toml=None, env={}, prefix="X_", flags=given)
    return startup_error(caught.value, cls)


def test_the_nearest_setting_is_named() -> None:
    assert problem(Few, max_modle_len="3") == "error: --max-modle-len (flag): no such setting; is max_model_len meant?"
    assert problem(Few, file_rot="3").endswith("no such setting; is file_root meant?")


def test_without_a_near_one_few_are_listed_and_many_are_not() -> None:
    assert problem(Few, zzz="3").endswith("no such setting; there are file_root, file_roots, max_model_len, namespaces")
    assert problem(MANY, zzz="3") == "error: --zzz (flag): no such setting; --help lists them"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RegistryUnavailable("the database is away: refused\n\tIs the server running there?"),
            "error: REGISTRY_UNAVAILABLE: the database is away: refused Is the server running there?",
        ),
        (InvalidArgument.of("file_roots", "no such folder:\n/x"), "error: --file-root: no such folder: /x"),
    ],
)
def test_an_error_of_several_lines_is_told_in_one(error: LoraplexError, line: str) -> None:
    assert startup_error(error, Few) == line
