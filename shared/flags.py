"""A command line whose flags are the fields of a configuration class."""

import argparse
from pathlib import Path
from typing import Any

from shared.config import Option, options


def flag_parser(cls: type, prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with `--config FILE` and one flag a field of `cls`.

    Values stay text and flags that were not given are None: `shared.config.load` reads them, so that all wrong ones
    are reported together.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the same settings")
    for option in options(cls):
        _add(parser, option)
    return parser


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
