"""Configuration: a frozen dataclass read from a TOML file, environment variables and flags, later ones winning.

A field's default, type and `metadata={"help": …}` say all there is to know about a setting: `load` reads it and
`options` lists it for a command line. Types: str, int, float, bool, Path, Literal of strings, tuple[str, ...],
dict[str, str], and any of these `| None`; or a dict of dataclasses of these: tables `[field.NAME]` in the TOML file.
Further metadata: `flag` (the flag's name where it is not the field's; files and variables take either), `is_secret`
(no message repeats the value) and `check`, a function that returns None for a good value and else what was expected.
"""

import dataclasses
import math
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_TOO_LARGE = 1 << 1000  # for a float
_FEW = 16  # names that still fit into a message
# Kubernetes sets such variables for every Service: one called `loraplex-registry` makes LORAPLEX_REGISTRY_PORT.
_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP)(_.*)?)")


class Problem(NamedTuple):
    """One wrong setting: its key, where it was given, and what was expected there."""

    key: str
    origin: str
    expected: str

    def __str__(self) -> str:
        return f"{self.key} ({self.origin}): {self.expected}"


class ConfigError(ValueError):
    """Everything that is wrong with the settings, at once."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class Option(NamedTuple):
    """One setting as a command line offers it. `kind` is str, int, float, bool or Path, of one element if `repeated`.

    `mapping` says that each value is NAME=VALUE; `is_table` that only a TOML file can give it.
    """

    name: str
    flag: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    repeated: bool = False
    mapping: bool = False
    is_table: bool = False


class _Type(NamedTuple):
    kind: type
    choices: tuple[str, ...]
    repeated: bool
    mapping: bool
    optional: bool
    is_table: bool = False


class _Wrong(Exception):
    """What was expected instead of a value. `article` comes before the value."""

    def __init__(self, expected: str, raw: Any, article: str = "") -> None:
        super().__init__(f"expected {expected}, is {article}{raw!r:.100}")
        self.expected = f"expected {expected}"


def options(cls: type[Any]) -> list[Option]:
    """The settings of the dataclass `cls`, in order."""
    kinds = _types(cls)
    return [
        Option(
            field.name,
            field.metadata.get("flag", "--" + field.name.replace("_", "-")),
            kinds[field.name].kind,
            _default(field),
            field.metadata.get("help", ""),
            kinds[field.name].choices,
            kinds[field.name].repeated,
            kinds[field.name].mapping,
            kinds[field.name].is_table,
        )
        for field in dataclasses.fields(cls)
    ]


def is_address(text: str) -> str | None:
    """A `check` for an address to listen on: HOST:PORT, [IPv6]:PORT or unix:PATH."""
    return None if text.startswith("unix:") else is_tcp_address(text)


def is_tcp_address(text: str) -> str | None:
    """A `check` for an address of HTTP: HOST:PORT or [IPv6]:PORT."""
    host, colon, port = text.rpartition(":")
    is_right = bool(colon and host and port.isdecimal() and int(port) < 1 << 16)
    return None if is_right and not text.startswith("unix:") else "HOST:PORT"


def load(cls: type[T], *, toml: Path | None, env: Mapping[str, str], prefix: str, flags: Mapping[str, Any]) -> T:
    """Read `cls` from a TOML file, the variables of `env` that begin with `prefix`, and `flags` (None: not given).

    In variables, a list is separated by commas and a mapping is NAME=VALUE,NAME=VALUE. A mapping or list given in a
    later place replaces the earlier one.

    Raises:
        ConfigError: names every unknown key, every wrong value and every missing one, with its origin and what was
            expected.
    """
    problems: list[Problem] = []
    missing = {option.name: option.flag for option in options(cls) if option.default is dataclasses.MISSING}
    values = _values(cls, _given(toml, env, prefix, _by_flag(cls, flags), problems), missing, problems)
    problems.extend(Problem(flag, "not given", "is required") for flag in missing.values())
    if problems:
        raise ConfigError(problems)
    return cls(**values)


def _values(
    cls: type[Any], given: Sequence["_Given"], missing: dict[str, str], problems: list[Problem]
) -> dict[str, Any]:
    """What `given` says of the fields of `cls`. Takes what was given out of `missing` and notes every problem."""
    kinds = _types(cls)
    metadata = {field.name: field.metadata for field in dataclasses.fields(cls)}
    by_flag = {option.flag.strip("-").replace("-", "_"): option.name for option in options(cls)}
    values: dict[str, Any] = {}
    labels: dict[tuple[str, str], str] = {}
    for item in (each._replace(name=by_flag.get(each.name, each.name)) for each in given):
        if (same := labels.setdefault((item.name, item.origin), item.label)) != item.label:
            problems.append(Problem(item.label, item.origin, f"is the same setting as {same}"))
        missing.pop(item.name, None)
        if item.name not in kinds:
            problems.append(
                Problem(item.label, item.origin, f"no such setting; {_meant(item.name, [*kinds, *by_flag])}")
            )
        elif kinds[item.name].is_table:
            values[item.name] = _tables(item, kinds[item.name].kind, problems)
        else:
            about = metadata[item.name]
            try:
                values[item.name] = _checked(_read(item, kinds[item.name]), about.get("check"))
            except _Wrong as wrong:
                said = wrong.expected if about.get("is_secret") else str(wrong)
                problems.append(Problem(item.label, item.origin, said))
    return values


def _meant(name: str, known: Sequence[str]) -> str:
    """What to write instead of a name that is none of `known`."""
    if near := get_close_matches(name.lower().replace("-", "_"), known, 1):
        return f"is {near[0]} meant?"
    return f"there are {', '.join(sorted(set(known)))}" if len(known) <= _FEW else "--help lists them"


def _tables(given: "_Given", cls: type[Any], problems: list[Problem]) -> dict[str, Any]:
    """One object of `cls` for each table `[given.NAME]`."""
    found: dict[str, Any] = {}
    if not given.is_typed or not isinstance(given.raw, Mapping):
        problems.append(Problem(given.label, given.origin, "expected tables in the TOML file"))
        return found
    for name, table in given.raw.items():
        label = f"{given.label}.{name}"
        if not isinstance(table, Mapping):
            problems.append(Problem(label, given.origin, "expected a table"))
            continue
        missing = {o.name: f"{label}.{o.name}" for o in options(cls) if o.default is dataclasses.MISSING}
        items = [_Given(f"{label}.{key}", key, raw, given.origin, is_typed=True) for key, raw in table.items()]
        before = len(problems)
        values = _values(cls, items, missing, problems)
        problems.extend(Problem(key, given.origin, "is required") for key in missing.values())
        if len(problems) == before:
            found[name] = cls(**values)
    return found


class _Given(NamedTuple):
    """A value as it was given. `is_typed`: it comes from TOML, where a number is not written as a string."""

    label: str
    name: str
    raw: Any
    origin: str
    is_typed: bool = False


def _by_flag(cls: type[Any], flags: Mapping[str, Any]) -> list[_Given]:
    """The flags that were given, under the names by which they were typed."""
    typed = {option.name: option.flag for option in options(cls)}
    return [
        _Given(typed.get(name, "--" + name.replace("_", "-")), name, value, "flag")
        for name, value in flags.items()
        if value is not None
    ]


def _given(
    toml: Path | None, env: Mapping[str, str], prefix: str, flags: list[_Given], problems: list[Problem]
) -> list[_Given]:
    """Everything given, lowest precedence first."""
    names = {key: key[len(prefix) :] for key in sorted(env) if key.startswith(prefix)}
    return [
        *_from_toml(toml, problems),
        *(
            _Given(key, name.lower(), env[key], "environment")
            for key, name in names.items()
            if not _SERVICE_LINK.fullmatch(name)
        ),
        *flags,
    ]


def _from_toml(toml: Path | None, problems: list[Problem]) -> list[_Given]:
    if toml is None:
        return []
    try:
        with toml.open("rb") as file:
            return [_Given(key, key, value, str(toml), is_typed=True) for key, value in tomllib.load(file).items()]
    except OSError as error:
        problems.append(Problem("config file", str(toml), f"cannot be read: {error.strerror}"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(Problem("config file", str(toml), f"is not TOML: {error}"))
    return []


def _types(cls: type[Any]) -> dict[str, _Type]:
    hints = get_type_hints(cls)
    return {field.name: _type(hints[field.name]) for field in dataclasses.fields(cls)}


def _type(hint: Any) -> _Type:
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(arg for arg in get_args(hint) if arg is not type(None))
        return _type(inner)._replace(optional=True)
    if get_origin(hint) is Literal:
        return _Type(str, get_args(hint), repeated=False, mapping=False, optional=False)
    if get_origin(hint) is tuple:
        return _Type(str, (), repeated=True, mapping=False, optional=False)
    if get_origin(hint) is dict and dataclasses.is_dataclass(inner := get_args(hint)[1]):
        return _Type(cast(type, inner), (), repeated=True, mapping=True, optional=False, is_table=True)
    if get_origin(hint) is dict:
        return _Type(str, (), repeated=True, mapping=True, optional=False)
    return _Type(hint, (), repeated=False, mapping=False, optional=False)


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _checked(value: Any, check: Callable[[Any], str | None] | None) -> Any:
    expected = check(value) if check is not None and value is not None else None
    if expected is not None:
        raise _Wrong(expected, value)
    return value


def _read(given: _Given, kind: _Type) -> Any:
    if kind.mapping:
        return _mapping(given.raw)
    if kind.repeated:
        return _strings(given.raw)
    if given.is_typed and isinstance(given.raw, str) and kind.kind in (int, float, bool):
        raise _Wrong(_named(kind), given.raw, "the string ")
    return _scalar(given.raw, kind)


def _scalar(raw: Any, kind: _Type) -> Any:
    value = _parsed(raw.strip(), kind.kind) if isinstance(raw, str) else raw
    if kind.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < _TOO_LARGE else math.inf
    is_right = isinstance(value, kind.kind) and (kind.kind is bool or not isinstance(value, bool))
    is_right = is_right and not (isinstance(value, float) and not math.isfinite(value))
    if not is_right or (kind.choices and value not in kind.choices):
        raise _Wrong(_named(kind), raw)
    return value


def _parsed(text: str, kind: type) -> Any:
    """`text` as `kind`; None if it is none."""
    try:
        if kind is bool:
            return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
        if kind is float:
            return float(text)
        return kind(text)
    except ValueError:
        return None


def _named(kind: _Type) -> str:
    if kind.choices:
        return "one of " + ", ".join(kind.choices)
    return {
        str: "a string", int: "an integer", float: "a number", bool: "true or false", Path: "a path"
    }.get(kind.kind, kind.kind.__name__)  # fmt: skip


def _strings(raw: Any) -> tuple[str, ...]:
    items = [item.strip() for item in raw.split(",") if item.strip()] if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise _Wrong("a list of strings", raw)
    return tuple(items)


def _mapping(raw: Any) -> dict[str, str]:
    if isinstance(raw, Mapping):
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in raw.items()):
            raise _Wrong("a table of strings", raw)
        return dict(raw)
    pairs = [item.partition("=") for item in _strings(raw)]
    if not all(name and equals for name, equals, _ in pairs):
        raise _Wrong("NAME=VALUE", raw)
    return {name: value for name, _, value in pairs}
