"""A command line whose flags are the fields of a configuration class."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from shared.config import ConfigError, Option, options
from shared.errors import InvalidArgument, LoraplexError, one_line


def flag_parser(
    cls: type, prog: str, description: str, names: Collection[str] | None = None
) -> argparse.ArgumentParser:
    """A parser with `--config FILE` and one flag a field of `cls`, or one for each of the fields `names`.

    Values stay text and flags that were not given are None: `shared.config.load` reads them, so that all wrong ones
    are reported together.
    """
    parser = _Parser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the same settings")
    for option in options(cls):
        if not option.is_table and (names is None or option.name in names):
            _add(parser, option)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage of dozens of flags before it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def startup_error(error: ConfigError | LoraplexError, cls: type) -> str:
    """The line with which a service says why it does not start: settings of `cls` are named as their flags are."""
    if isinstance(error, ConfigError):
        text = str(error)
    elif isinstance(error, InvalidArgument):
        flags = {option.name: option.flag for option in options(cls)}
        text = "; ".join(f"{flags.get(v.field, v.field)}: {v.description}" for v in error.violations)
    else:
        text = error.summary
    return f"error: {one_line(text)}"


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    settings: dict[str, Any] = {"dest": option.name, "default": None, "help": option.help + _default(option)}
    if option.kind is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **settings)
        return
    settings["metavar"] = "|".join(option.choices) or ("NAME=VALUE" if option.mapping else option.kind.__name__.upper())
    settings["action"] = "append" if option.repeated else "store"
    parser.add_argument(option.flag, **settings)


def _default(option: Option) -> str:
    if not isinstance(option.default, str | int | float | Path | dict | tuple | None):
        return " (required)"
    if option.default in (None, {}, ()) or option.repeated:
        return ""
    return f" [{option.default}]".replace("%", "%%")
