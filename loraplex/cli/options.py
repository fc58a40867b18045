"""Options that several commands share, and how a command calls a service and prints what comes back."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from loraplex.client import Client

Result = TypeVar("Result")

RegistryAddress = Annotated[
    str, typer.Option("--registry", envvar="LORAPLEX_REGISTRY", help="host:port of the registry service.")
]
ServerAddress = Annotated[
    str, typer.Option("--server", envvar="LORAPLEX_SERVER", help="host:port of the inference service.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEFAULT_REGISTRY = "localhost:50051"
DEFAULT_SERVER = "localhost:50052"


def run(
    work: Callable[[Client], Awaitable[Result]], *, registry: str = DEFAULT_REGISTRY, server: str = DEFAULT_SERVER
) -> Result:
    """Opens a client, does `work` with it, closes it."""

    async def session() -> Result:
        async with Client(server, registry) as client:
            return await work(client)

    return asyncio.run(session())


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON data, with the field names of the proto."""
    return MessageToDict(message, preserving_proto_field_name=True)


def print_json(data: Any) -> None:
    """Prints messages, or lists of them, as JSON."""
    if isinstance(data, Message):
        data = as_dict(data)
    elif isinstance(data, list):
        data = [as_dict(d) if isinstance(d, Message) else d for d in data]
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table as wide as its content."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def key_values(items: Sequence[str], option: str) -> dict[str, str]:
    """`K=V` arguments as a dict.

    Raises:
        typer.BadParameter: an item has no `=` or an empty key.
    """
    pairs = [item.partition("=") for item in items]
    for item, (key, sign, _) in zip(items, pairs, strict=True):
        if not key or not sign:
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=option)
    return {key: value for key, _, value in pairs}


def megabytes(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e6:.2f} MB" if size >= 1e4 else f"{size} B"
