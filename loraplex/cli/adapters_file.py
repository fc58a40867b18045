"""The YAML file of `loraplex apply`."""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml

from loraplex.cli.names import read as read_name
from loraplex.cli.options import names_version
from shared.errors import InvalidArgument

Weight = Annotated[float, msgspec.Meta(gt=0)]


class AdapterEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One adapter. None: the file does not say, so whatever is registered is right.

    `aliases`: names, or names with this version's weights beside other entries' of the adapter.
    """

    name: str
    source: str
    base_model: str
    aliases: list[str] | dict[str, Weight] | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    description: str | None = None
    default_alias: str | None = None
    residency: Literal["on-demand", "preload", "pinned"] | None = None
    credential: str = ""


class AdaptersFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    adapters: list[AdapterEntry]


class WrongFile(ValueError):
    """The file cannot be applied. The text names file, line and key, and says what is expected."""


def read(file: Path) -> list[AdapterEntry]:
    """The entries of `file`.

    Raises:
        WrongFile: it cannot be read, or is not what is expected.
    """
    text = _text(file)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        data = yaml.load(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise WrongFile(f"{file}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise WrongFile(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise WrongFile(f"{file}: is empty; expected a list `adapters`")
    try:
        entries = msgspec.convert(data, AdaptersFile).adapters
    except msgspec.ValidationError as error:
        raise _wrong(file, root, str(error)) from None
    for index, entry in enumerate(entries):
        _check_entry(file, root, f"$.adapters[{index}]", entry)
    return entries


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise WrongFile(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise WrongFile(f"{file}, line {line}: is not UTF-8 text") from None


def _check_entry(file: Path, root: yaml.Node | None, path: str, entry: AdapterEntry) -> None:
    try:
        reference = read_name(entry.name)
    except InvalidArgument as error:
        raise _wrong(file, root, f"{error.violations[0].description} - at `{path}.name`") from None
    if names_version(reference):
        raise _wrong(file, root, f"{entry.name!r} is not [NAMESPACE/]ADAPTER - at `{path}.name`")
    try:
        msgspec.json.encode(entry)
    except UnicodeEncodeError:
        raise _wrong(file, root, f"holds half of a surrogate pair - at `{path}`") from None


def _wrong(file: Path, root: yaml.Node | None, message: str) -> WrongFile:
    """The error for what msgspec says: "Expected `str`, got `int` - at `$.adapters[0].name`"."""
    text, _, path = message.replace(" | null", "").partition(" - at ")
    key = path.strip("`").removeprefix("$").removeprefix(".")
    unknown = re.search(r"unknown field `(.*)`", text)
    steps = re.findall(r"[^.\[\]]+", key) + ([unknown[1]] if unknown else [])
    place = f", {key}" if key else ""
    return WrongFile(f"{file}, line {_line(root, steps)}{place}: {text[:1].lower()}{text[1:]}")


def _line(node: yaml.Node | None, steps: list[str]) -> int:
    """The line of the deepest of `steps` (keys and indices) that exists, counted from 1."""
    line = 1 if node is None else node.start_mark.line + 1
    for step in steps:
        if isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
            node = node.value[int(step)]
            line = node.start_mark.line + 1
            continue
        found = [pair for pair in node.value if pair[0].value == step] if isinstance(node, yaml.MappingNode) else []
        if not found:
            break
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line
