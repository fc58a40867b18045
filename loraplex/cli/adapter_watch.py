"""`loraplex adapter watch`: what changes in the registry, as it changes."""

import json as json_format
from contextlib import aclosing
from typing import Annotated

import typer

from loraplex.cli.calls import run
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress
from loraplex.cli.output import alias_targets, as_dict, short_adapter
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2


def watch(
    namespace: Annotated[str, typer.Option(help="Namespace; - for all.")] = "-",
    base_model: Annotated[str, typer.Option(help="Base model id; only adapters for it.")] = "",
    resume_token: Annotated[str, typer.Option(help="Of an earlier watch with --json: continue after it.")] = "",
    skip_snapshot: Annotated[bool, typer.Option("--skip-snapshot", help="Not what there is already.")] = False,
    until_complete: Annotated[bool, typer.Option("--once", help="Stop after what there is already.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Print every change of an adapter until Ctrl-C. One line each, or one JSON object a line with its resume token."""

    async def follow(client: Client) -> None:
        responses = client.watch_adapters(
            namespace, base_model=base_model, resume_token=resume_token, skip_snapshot=skip_snapshot
        )
        async with aclosing(responses):
            async for response in responses:
                for line in _json_lines(response) if json else map(_line, response.changes):
                    typer.echo(line)
                if until_complete and response.snapshot_complete:
                    return

    run(follow, registry=registry)


def add_commands(app: typer.Typer) -> None:
    """Adds `watch`."""
    app.command("watch")(watch)


def _json_lines(response: registry_pb2.WatchAdaptersResponse) -> list[str]:
    """The token of the last line continues after all of them; lines before it have none."""
    lines = [as_dict(change) for change in response.changes]
    if lines:
        lines[-1]["resume_token"] = response.resume_token
    return [json_format.dumps(line, ensure_ascii=False) for line in lines]


def _line(change: registry_pb2.AdapterChange) -> str:
    kind = registry_pb2.AdapterChange.Type.Name(change.type).removeprefix("TYPE_")
    adapter = change.adapter
    base_model = adapter.base_model.removeprefix("baseModels/")
    told = [_names(adapter), f"({change.deleted_version} deleted)" if change.deleted_version else ""]
    begin = f"{change.revision:>8}  {kind:6}  {short_adapter(adapter.name)}  {base_model}"
    return "  ".join([begin, *filter(None, told)])


def _names(adapter: resources_pb2.Adapter) -> str:
    """What the adapter's aliases mean."""
    names = [("latest", str(adapter.latest_version))] if adapter.latest_version else []
    for alias in adapter.aliases:
        name = alias.name.rpartition("/")[2]
        names.append((name, alias_targets(alias)))
    return ", ".join(f"{name}→{version}" for name, version in names)
