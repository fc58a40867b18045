"""`loraplex adapter alias`, `promote`, `rollback` and `delete-version`: which versions names mean."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from loraplex.cli.calls import run
from loraplex.cli.names import written
from loraplex.cli.options import (
    DEFAULT_REGISTRY,
    MAX_INT32,
    AdapterArgument,
    Json,
    ReferenceArgument,
    RegistryAddress,
    parsed,
    parsed_adapter,
)
from loraplex.cli.output import alias_targets, print_json, short_adapter
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import AdapterNotFound, FailedPrecondition
from shared.references import Reference, parse_version_name

AliasOption = Annotated[str, typer.Option(help="The alias that is moved.")]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command()(alias)
    app.command()(promote)
    app.command()(rollback)
    app.command("delete-version")(delete_version)


def alias(
    reference: Annotated[str, typer.Argument(help="[NAMESPACE/]ADAPTER@ALIAS")],
    versions: Annotated[
        list[str] | None, typer.Argument(metavar="VERSION[:WEIGHT]", help="Several share the requests by weight.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Take the alias away.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Point an alias at a version, or at several by weight. As in `alias chat@prod 7:9 8:1`."""
    target = parsed(reference, "REFERENCE")
    if not target.alias:
        raise typer.BadParameter(f"{reference!r} names no alias; write ADAPTER@ALIAS", param_hint="REFERENCE")
    if delete == bool(versions):
        raise typer.BadParameter("give either versions or --delete", param_hint="VERSION")
    name = written(target)
    if delete:
        request = registry_pb2.DeleteAdapterAliasRequest(name=name)
        deleted = run(lambda c: c.call(c.registry.DeleteAdapterAlias(request)), registry=registry)
        return print_json(deleted.adapter) if json else typer.echo(f"deleted: {reference}")
    change = registry_pb2.SetAdapterAliasRequest(name=name, targets=[_target(text) for text in versions or ()])
    changed = run(lambda c: c.call(c.registry.SetAdapterAlias(change)), registry=registry)
    return print_json(changed.adapter) if json else typer.echo(f"{reference} → version {_meaning(changed, target)}")


def _target(text: str) -> resources_pb2.AliasTarget:
    number, colon, weight = text.partition(":")
    try:
        target = resources_pb2.AliasTarget(version=int(number), weight=float(weight) if colon else 1.0)
    except ValueError:
        target = resources_pb2.AliasTarget()
    if colon and weight and target.version and not target.weight > 0:
        raise typer.BadParameter(f"{text!r}: a weight must be above 0", param_hint="VERSION")
    if not 1 <= target.version <= MAX_INT32 or not 0 < target.weight < float("inf"):
        raise typer.BadParameter(f"{text!r} is not VERSION or VERSION:WEIGHT, such as 3 or 3:0.1", param_hint="VERSION")
    return target


def promote(
    reference: ReferenceArgument,
    alias: AliasOption = "prod",
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Point an alias at the version that a reference means. As in `promote chat@canary --alias prod`."""
    target = parsed(reference)

    async def work(client: Client) -> registry_pb2.SetAdapterAliasResponse:
        adapter = await _adapter(client, target)
        resolve = registry_pb2.ResolveAdapterRequest(reference=written(target))
        resolved = await client.call(client.registry.ResolveAdapter(resolve))
        if len(resolved.targets) > 1:
            raise FailedPrecondition(f"{reference} means several versions: name one of them by its number")
        number = parse_version_name(resolved.version.name, "version.name").version
        return await _point(client, adapter, target, alias, [resources_pb2.AliasTarget(version=number)])

    return _print_moved(run(work, registry=registry), target, alias, json)


def rollback(
    adapter: AdapterArgument,
    alias: AliasOption = "prod",
    to: Annotated[
        int | None, typer.Option(min=1, max=MAX_INT32, help="This version, whatever the alias meant before.")
    ] = None,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Undo the last change of an alias, shares included. Twice is back where it was."""
    target = parsed_adapter(adapter)

    async def work(client: Client) -> registry_pb2.SetAdapterAliasResponse:
        found = await _adapter(client, target)
        targets = [resources_pb2.AliasTarget(version=to)] if to else await _previous_targets(client, found, alias)
        return await _point(client, found, target, alias, targets)

    return _print_moved(run(work, registry=registry), target, alias, json)


async def _previous_targets(
    client: Client, adapter: resources_pb2.Adapter, alias: str
) -> list[resources_pb2.AliasTarget]:
    """What the alias meant before its last change, all of which is still there."""
    found = [each for each in adapter.aliases if each.name.rpartition("/")[2] == alias]
    if not found:
        raise AdapterNotFound(f"adapter {adapter.name} has no alias {alias}")
    previous = list(found[0].previous_targets)
    if not previous:
        raise FailedPrecondition(f"{found[0].name} was never changed as far as the registry knows: say --to VERSION")
    live = await asyncio.gather(*(_is_live(client, f"{adapter.name}/versions/{t.version}") for t in previous))
    deleted = [str(target.version) for target, is_live in zip(previous, live, strict=True) if not is_live]
    if deleted:
        raise FailedPrecondition(
            f"{found[0].name} meant versions that are deleted now ({', '.join(deleted)}): say --to VERSION, or "
            "`loraplex adapter alias` for several"
        )
    return previous


async def _is_live(client: Client, name: str) -> bool:
    request = registry_pb2.GetAdapterVersionRequest(name=name)
    try:
        version = await client.call(client.registry.GetAdapterVersion(request))
    except AdapterNotFound:  # purged
        return False
    return version.state != resources_pb2.AdapterVersion.STATE_DELETED


async def _adapter(client: Client, target: Reference) -> resources_pb2.Adapter:
    name = written(target._replace(version=None, digest=None, alias=None))
    return await client.call(client.registry.GetAdapter(registry_pb2.GetAdapterRequest(name=name)))


async def _point(
    client: Client,
    adapter: resources_pb2.Adapter,
    target: Reference,
    alias: str,
    targets: Sequence[resources_pb2.AliasTarget],
) -> registry_pb2.SetAdapterAliasResponse:
    """By the etag of what was read: nobody's change in between is undone."""
    request = registry_pb2.SetAdapterAliasRequest(
        name=written(target._replace(version=None, digest=None, alias=alias)),
        targets=targets,
        etag=adapter.etag,
    )
    return await client.call(client.registry.SetAdapterAlias(request))


def _print_moved(changed: registry_pb2.SetAdapterAliasResponse, target: Reference, alias: str, as_json: bool) -> None:
    if as_json:
        return print_json(changed.adapter)
    name = target._replace(version=None, digest=None, alias=alias)
    return typer.echo(f"{short_adapter(written(name))} → version {_meaning(changed, name)}")


def _meaning(changed: registry_pb2.SetAdapterAliasResponse, target: Reference) -> str:
    (found,) = [alias for alias in changed.adapter.aliases if alias.name.rpartition("/")[2] == target.alias]
    return alias_targets(found)


def delete_version(
    reference: Annotated[str, typer.Argument(help="[NAMESPACE/]ADAPTER@VERSION")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Only a terminal is asked.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Delete one version, for good. Refused while an alias means it; its number is never used again."""
    target = parsed(reference, "REFERENCE")
    if target.version is None:
        raise typer.BadParameter(f"{reference!r} names no version; write ADAPTER@3", param_hint="REFERENCE")
    name = written(target)
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete {name}? It cannot be brought back.", abort=True, err=True)
    request = registry_pb2.DeleteAdapterVersionRequest(name=name)
    response = run(lambda c: c.call(c.registry.DeleteAdapterVersion(request)), registry=registry)
    return print_json(response.version) if json else typer.echo(f"deleted: {response.version.name}")
