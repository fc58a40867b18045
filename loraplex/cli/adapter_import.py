"""`loraplex adapter import`: registers every adapter of a folder, or of a user or organisation on the Hub."""

import asyncio
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loraplex.cli.calls import is_foreign, run
from loraplex.cli.identity import own_namespace
from loraplex.cli.names import parent
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress
from loraplex.cli.output import print_json, print_table, short_digest
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.adapter_format.files import CONFIG, PICKLE, WEIGHTS
from shared.errors import InvalidArgument, LoraplexError
from shared.references import check_id

AT_ONCE = 4  # the registry validates more at once, and others want their share

_HUB = re.compile(r"hf://([\w.-]+)/?")


class Found(NamedTuple):
    """An adapter to register: its id, and where the services read it."""

    adapter: str
    source: str


class Row(NamedTuple):
    """What became of one. `version` is 0 and `digest` empty if there is none."""

    adapter: str
    result: str
    version: int
    digest: str
    detail: str


def add_commands(app: typer.Typer) -> None:
    """Adds `import`."""
    app.command("import")(import_adapters)


def import_adapters(
    source: Annotated[str, typer.Argument(help="A folder of adapters' folders, or hf://ORGANISATION.")],
    base_model: Annotated[str, typer.Option(help="Base model id.")],
    uri: Annotated[str, typer.Option(help="What the services call the folder: file://ROOT[/path].")] = "",
    namespace: Annotated[str, typer.Option(help="Namespace to register in.")] = "",
    alias: Annotated[list[str], typer.Option(help="Point this alias at each version; repeatable.")] = [],  # noqa: B006
    credential: Annotated[str, typer.Option(help="Name of a credential in the services' configuration.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Register every adapter of a folder or Hub organisation. Again, it registers what is new or has changed.

    An adapter is called as its folder or repository is, in lower case and with - for what ids cannot have. One that is
    refused stops no other; the exit status is then 1.
    """
    found = _of_hub(source) if source.startswith("hf://") else _of_folder(source, uri)

    async def work(client: Client) -> list[Row]:
        with _progress() as progress:
            task = progress.add_task("validating" if dry_run else "registering", total=len(found))
            at_once = asyncio.Semaphore(AT_ONCE)

            async def one(entry: Found) -> Row:
                async with at_once:
                    request = _request(entry, namespace or own_namespace(), base_model, alias, credential, dry_run)
                    row = await _register(client, entry, request)
                progress.advance(task)
                return row

            return await asyncio.gather(*map(one, found))

    rows = run(work, registry=registry)
    if json:
        print_json([row._asdict() for row in rows])
    else:
        cells = ((r.adapter, r.result, r.version or "-", short_digest(r.digest) or "-", r.detail or "-") for r in rows)
        print_table(("ADAPTER", "RESULT", "VERSION", "DIGEST", "DETAIL"), cells, fold="DETAIL")
    if any(row.result == "failed" for row in rows):
        raise typer.Exit(1)


def _of_folder(folder: str, uri: str) -> list[Found]:
    root = Path(folder)
    if not os.path.isdir(folder):  # noqa: PTH112  # Path.is_dir raises for a name that is too long
        raise typer.BadParameter(f"{folder} is not a folder", param_hint="SOURCE")
    if not uri.startswith("file://"):
        raise typer.BadParameter("a folder needs --uri file://ROOT, its name for the services", param_hint="--uri")
    # One with half of an adapter is one: the registry says what is missing.
    folders = sorted({file.parent.relative_to(root) for name in (CONFIG, WEIGHTS, PICKLE) for file in root.rglob(name)})
    found = [
        Found(_id_of("-".join(path.parts) or root.resolve().name), f"{uri.rstrip('/')}/{path}") for path in folders
    ]
    return _distinct(found, folder)


def _of_hub(source: str) -> list[Found]:
    match = _HUB.fullmatch(source)
    if match is None:
        raise typer.BadParameter(f"{source!r} is not hf://ORGANISATION", param_hint="SOURCE")
    try:  # imported here because its client takes half a second that a folder never needs
        from shared.sources.hub import adapters_of
    except ValueError as error:  # it reads its settings then
        raise typer.BadParameter(f"is no URL: {error}", param_hint="HF_ENDPOINT") from None
    found = [Found(_id_of(name.rpartition("/")[2]), f"hf://{name}") for name in adapters_of(match[1])]
    return _distinct(found, source)


def _distinct(found: Sequence[Found], source: str) -> list[Found]:
    if not found:
        raise typer.BadParameter(f"{source} has no adapters", param_hint="SOURCE")
    seen: dict[str, Found] = {}
    for entry in found:
        if (other := seen.setdefault(entry.adapter, entry)) is not entry:
            message = f"{other.source} and {entry.source} would both be called {entry.adapter}"
            raise typer.BadParameter(message, param_hint="SOURCE")
    return list(found)


def _id_of(name: str) -> str:
    """The id nearest to a name."""
    text = re.sub(r"[^a-z0-9._-]+", "-", name.lower())[:63].strip(".-_")
    try:
        return check_id(text, "SOURCE")
    except InvalidArgument as error:
        raise typer.BadParameter(f"{name!r}: {error.violations[0].description}", param_hint="SOURCE") from None


def _request(
    entry: Found, namespace: str, base_model: str, aliases: Sequence[str], credential: str, dry_run: bool
) -> registry_pb2.RegisterAdapterRequest:
    return registry_pb2.RegisterAdapterRequest(
        parent=parent(namespace),
        adapter_id=entry.adapter,
        base_model=base_model,
        source=resources_pb2.AdapterSource(uri=entry.source, credential_ref=credential),
        aliases=aliases,
        request_id=str(uuid.uuid4()),
        validate_only=dry_run,
    )


async def _register(client: Client, entry: Found, request: registry_pb2.RegisterAdapterRequest) -> Row:
    try:
        response = await client.call(client.registry.RegisterAdapter(request))
    except LoraplexError as error:
        if is_foreign(error):
            raise
        return Row(entry.adapter, "failed", 0, "", error.summary)
    number = int(response.version.name.rpartition("/")[2] or 0)
    result = "valid" if request.validate_only else "registered" if response.created else "unchanged"
    return Row(entry.adapter, result, number, response.version.digest, entry.source)


def _progress() -> Progress:
    """On standard error, and only where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
