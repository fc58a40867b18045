"""`loraplex adapter update`: what an adapter's owner may change of it."""

from typing import Annotated

import typer
from google.protobuf import field_mask_pb2

from loraplex.cli.calls import run
from loraplex.cli.names import written
from loraplex.cli.options import (
    DEFAULT_REGISTRY,
    AdapterArgument,
    Json,
    RegistryAddress,
    key_values,
    parsed_adapter,
)
from loraplex.cli.output import print_json, short_adapter
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2

# As people write them.
RESIDENCIES = {
    "on-demand": resources_pb2.Adapter.RESIDENCY_ON_DEMAND,
    "preload": resources_pb2.Adapter.RESIDENCY_PRELOAD,
    "pinned": resources_pb2.Adapter.RESIDENCY_PINNED,
}


def _residency(text: str | None) -> str | None:
    if text is not None and text not in RESIDENCIES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(RESIDENCIES)}")
    return text


def add_commands(app: typer.Typer) -> None:
    """Adds `update`."""
    app.command()(update)


def update(
    adapter: AdapterArgument,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    label: Annotated[list[str], typer.Option(help="Set K=V; repeatable.")] = [],  # noqa: B006
    remove_label: Annotated[list[str], typer.Option(help="Take label K away; repeatable.")] = [],  # noqa: B006
    annotation: Annotated[list[str], typer.Option(help="Set K=V; repeatable.")] = [],  # noqa: B006
    remove_annotation: Annotated[list[str], typer.Option(help="Take annotation K away; repeatable.")] = [],  # noqa: B006
    default_alias: Annotated[str | None, typer.Option(help="What the name alone means; latest, or an alias.")] = None,
    residency: Annotated[
        str | None, typer.Option(metavar="|".join(RESIDENCIES), help="When replicas load it.", callback=_residency)
    ] = None,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Change an adapter. Its description, labels, annotations, default alias or residency."""
    target = parsed_adapter(adapter)
    labels, annotations = key_values(label, "--label"), key_values(annotation, "--annotation")
    change = resources_pb2.Adapter(description=description or "", default_alias=default_alias or "")
    paths = [
        name for name, value in (("description", description), ("default_alias", default_alias)) if value is not None
    ]
    if residency is not None:
        change.residency = RESIDENCIES[residency]
        paths.append("residency")
    maps = {"labels": (labels, remove_label), "annotations": (annotations, remove_annotation)}
    maps = {field: change for field, change in maps.items() if any(change)}
    if not paths and not maps:
        raise typer.BadParameter("say what to change; --help lists it", param_hint="update")

    async def work(client: Client) -> resources_pb2.Adapter:
        change.name = written(target)
        if maps:  # they are replaced as a whole, so nobody may change them in between
            request = registry_pb2.GetAdapterRequest(name=change.name)
            before = await client.call(client.registry.GetAdapter(request))
            change.etag = before.etag
            for field, (added, removed) in maps.items():
                pairs = {**getattr(before, field), **added}
                getattr(change, field).update({key: value for key, value in pairs.items() if key not in removed})
        return await updated(client, change, [*paths, *maps])

    found = run(work, registry=registry)
    return print_json(found) if json else typer.echo(f"updated: {short_adapter(found.name)}")


async def updated(client: Client, adapter: resources_pb2.Adapter, paths: list[str]) -> resources_pb2.Adapter:
    """Updates the fields `paths`. The adapter as it is then."""
    request = registry_pb2.UpdateAdapterRequest(adapter=adapter, update_mask=field_mask_pb2.FieldMask(paths=paths))
    return (await client.call(client.registry.UpdateAdapter(request))).adapter
