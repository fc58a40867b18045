"""What commands print: JSON, tables, and names and sizes as people write them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from loraplex.cli.identity import own_namespace
from loraplex.registry.v1 import resources_pb2
from shared.auth import DEFAULT_NAMESPACE
from shared.errors import InvalidArgument
from shared.references import parse_version_name

_INTEGERS_64 = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_EXACT_INTEGERS = 1 << 53  # a JSON number that readers may take for a double
_NARROWEST_FOLD = 24
_BETWEEN = 2  # blanks between columns


# ---- JSON


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON data: the proto's field names, unset fields at their defaults, 64-bit integers as numbers.

    Integers that a double does not hold exactly stay strings, as protobuf's own JSON has them.
    """
    data = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(message.DESCRIPTOR.fields_by_name, data)


def _with_numbers(fields: Mapping[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    if "num_versions" in data and "serving" not in data:  # an adapter of an answer that tells neither
        del data["num_versions"]
    return {name: _with_number(fields[name], value) if name in fields else value for name, value in data.items()}


def _with_number(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, list):
        return [_with_number(field, item) for item in value]
    if isinstance(value, dict) and field.message_type is not None:
        fields = field.message_type.fields_by_name
        if not field.message_type.GetOptions().map_entry:
            return _with_numbers(fields, value)
        return {key: _with_number(fields["value"], item) for key, item in value.items()}
    if field.cpp_type in _INTEGERS_64 and abs(int(value)) < _EXACT_INTEGERS:
        return int(value)
    return value


def print_json(data: Any) -> None:
    """Prints messages, or lists of them, as JSON."""
    if isinstance(data, Message):
        data = as_dict(data)
    elif isinstance(data, list):
        data = [as_dict(d) if isinstance(d, Message) else d for d in data]
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


# ---- tables


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, fold: str = "", spare: Sequence[str] = ()
) -> None:
    """Prints one line a row, as wide as its content, so that names, ids and digests can be copied and searched.

    Args:
        fold: The column of free text. On a terminal too narrow for the table it is folded; no other column ever is.
        spare: Columns that a terminal which is too narrow even so is spared, in this order, and told of.
    """
    cells = [[" ".join(str(cell).splitlines()) for cell in row] for row in rows]
    widths = [max(map(cell_len, (column, *texts))) for column, *texts in zip(columns, *cells, strict=True)]
    # Without markup, since texts may hold [brackets].
    console = Console(markup=False, emoji=False, highlight=False)
    room = console.width if console.is_terminal else 1 << 20
    least = [
        min(width, _NARROWEST_FOLD) if name == fold else width for name, width in zip(columns, widths, strict=True)
    ]
    shown = list(range(len(columns)))
    spared = [column for column in spare if _spares(shown, columns.index(column), least, room)]
    table = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for at in shown:
        table.add_column(columns[at], no_wrap=columns[at] != fold, overflow="fold")
    for row in cells:
        table.add_row(*(row[at] for at in shown))
    console.width = min(_total(shown, widths), max(room, _total(shown, least)))
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if spared:
        typer.echo(f"not shown, for want of room: {', '.join(spared)}", err=True)


def _spares(shown: list[int], column: int, widths: Sequence[int], room: int) -> bool:
    """Takes a column out of those shown if they are too wide."""
    is_too_wide = _total(shown, widths) > room
    if is_too_wide:
        shown.remove(column)
    return is_too_wide


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + _BETWEEN * len(shown)


# ---- words


def short_version(name: str) -> str:
    """`ADAPTER@N` for the resource name of a version, with `NS/` before it where that is needed."""
    try:
        namespace, adapter, version = parse_version_name(name, "name")
    except InvalidArgument:
        return name
    return f"{short_adapter(f'namespaces/{namespace}/adapters/{adapter}')}@{version}"


def short_adapter(name: str) -> str:
    """`ADAPTER` for the resource name of an adapter, with `NS/` before it where that is needed."""
    return (
        name.removeprefix("namespaces/")
        .replace("/adapters/", "/")
        .removeprefix(f"{own_namespace() or DEFAULT_NAMESPACE}/")
    )


def alias_targets(alias: resources_pb2.AdapterAlias) -> str:
    """The version that an alias means, or all of them as VERSION:WEIGHT."""
    if len(alias.targets) == 1:
        return str(alias.targets[0].version)
    return "+".join(f"{target.version}:{target.weight:g}" for target in alias.targets)


def short_digest(digest: str) -> str:
    """`sha256:` and the first twelve digits."""
    return digest[: len("sha256:") + 12]


def megabytes(size: int) -> str:
    """Bytes for people."""
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.2f} MB" if size >= 1e4 else f"{size} B"


def moment(time: Timestamp) -> str:
    """A time of day in UTC."""
    return time.ToDatetime().strftime("%Y-%m-%d %H:%M:%SZ")
