"""`loraplex adapter`: register, list, show, alias, delete, load, unload, convert."""

import uuid
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.options import (
    DEFAULT_REGISTRY,
    DEFAULT_SERVER,
    Json,
    RegistryAddress,
    ServerAddress,
    as_dict,
    key_values,
    megabytes,
    print_json,
    print_table,
    run,
)
from loraplex.client import Client
from loraplex.inference.v1 import control_pb2
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import Unimplemented
from shared.references import Reference, adapter_name, alias_name, parse_reference

app = typer.Typer(help="Manage adapters.", no_args_is_help=True)
console = Console(stderr=True)

ReferenceArgument = Annotated[str, typer.Argument(help="[NAMESPACE/]ADAPTER[@VERSION|@ALIAS|@sha256:HEX]")]


def _parse(text: str) -> Reference:
    return parse_reference(text, "default")


@app.command()
def register(
    reference: Annotated[str, typer.Argument(help="[NAMESPACE/]ADAPTER")],
    base_model: Annotated[str, typer.Option(help="Base model id.")],
    source: Annotated[str, typer.Option(help="file://ROOT/path, hf://org/repo or s3://bucket/prefix.")],
    alias: Annotated[list[str], typer.Option(help="Point this alias at the version; repeatable.")] = [],  # noqa: B006
    label: Annotated[list[str], typer.Option(help="K=V; repeatable.")] = [],  # noqa: B006
    description: Annotated[str, typer.Option(help="What the adapter is for.")] = "",
    credential: Annotated[str, typer.Option(help="Name of a credential in the services' configuration.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Validate an adapter and store it as a version."""
    target = _parse(reference)
    request = registry_pb2.RegisterAdapterRequest(
        parent=f"namespaces/{target.namespace}",
        adapter_id=target.adapter,
        base_model=base_model,
        source=resources_pb2.AdapterSource(uri=source, credential_ref=credential),
        aliases=alias,
        labels=key_values(label, "--label"),
        description=description,
        request_id=str(uuid.uuid4()),
        validate_only=dry_run,
    )
    with console.status("validating"):
        response = run(lambda c: c.call(c.registry.RegisterAdapter(request)), registry=registry)
    if json:
        return print_json(response)
    verb = "valid" if dry_run else ("registered" if response.created else "already registered")
    version = response.version
    typer.echo(
        f"{verb}: {version.name or reference} rank {version.lora_config.rank}, "
        f"{megabytes(version.size_bytes)}, {version.digest}"
    )
    for warning in version.warnings:
        console.print(f"warning: {warning}", style="yellow")
    return None


@app.command("list")
def list_adapters(
    namespace: Annotated[str, typer.Option(help="Namespace; - for all.")] = "default",
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted ones too.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """List adapters."""
    adapters = run(lambda c: _all_adapters(c, namespace, deleted), registry=registry)
    if json:
        return print_json(adapters)
    return print_table(
        ("ADAPTER", "LATEST", "ALIASES", "BASE MODEL", "DESCRIPTION"),
        (
            (
                _short(a.name) + (" (deleted)" if a.HasField("delete_time") else ""),
                a.latest_version or "-",
                ", ".join(f"{x.name.rpartition('/')[2]}→{_targets(x)}" for x in a.aliases) or "-",
                a.base_model.removeprefix("baseModels/"),
                a.description or "-",
            )
            for a in adapters
        ),
    )


async def _all_adapters(client: Client, namespace: str, deleted: bool) -> list[resources_pb2.Adapter]:
    adapters: list[resources_pb2.Adapter] = []
    token = ""
    while True:
        request = registry_pb2.ListAdaptersRequest(
            parent=f"namespaces/{namespace}", page_size=200, page_token=token, show_deleted=deleted
        )
        page = await client.call(client.registry.ListAdapters(request))
        adapters += page.adapters
        token = page.next_page_token
        if not token:
            return adapters


def _short(name: str) -> str:
    _, namespace, _, adapter = name.split("/")[:4]
    return adapter if namespace == "default" else f"{namespace}/{adapter}"


def _targets(alias: resources_pb2.AdapterAlias) -> str:
    if len(alias.targets) == 1:
        return str(alias.targets[0].version)
    return "+".join(f"{t.version}:{t.weight:g}" for t in alias.targets)


@app.command()
def show(reference: ReferenceArgument, json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY) -> None:
    """Show an adapter and the version that a reference means."""
    target = _parse(reference)

    async def both(client: Client) -> tuple[resources_pb2.Adapter, registry_pb2.ResolveAdapterResponse]:
        name = adapter_name(target.namespace, target.adapter)
        adapter = await client.call(client.registry.GetAdapter(registry_pb2.GetAdapterRequest(name=name)))
        resolve = registry_pb2.ResolveAdapterRequest(reference=target.canonical())
        return adapter, await client.call(client.registry.ResolveAdapter(resolve))

    adapter, resolved = run(both, registry=registry)
    if json:
        return print_json({"adapter": as_dict(adapter), "resolved": as_dict(resolved)})
    version, config = resolved.version, resolved.version.lora_config
    rows = {
        "adapter": adapter.name,
        "base model": adapter.base_model,
        "aliases": ", ".join(f"{a.name.rpartition('/')[2]}→{_targets(a)}" for a in adapter.aliases) or "-",
        "description": adapter.description or "-",
        "labels": ", ".join(f"{k}={v}" for k, v in sorted(adapter.labels.items())) or "-",
        "version": version.name.rpartition("/")[2],
        "digest": version.digest,
        "source": version.source.uri,
        "files": megabytes(version.size_bytes),
        "on a device": megabytes(config.device_bytes),
        "rank": config.rank,
        "alpha": f"{config.alpha:g}" + (" (rsLoRA)" if config.use_rslora else ""),
        "targets": ", ".join(config.target_modules),
        "modules": config.num_modules,
    }
    return print_table(("", ""), rows.items())


@app.command()
def alias(
    reference: Annotated[str, typer.Argument(help="[NAMESPACE/]ADAPTER@ALIAS")],
    version: Annotated[int, typer.Argument(help="Version number.")],
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Point an alias at a version."""
    target = _parse(reference)
    if not target.alias:
        raise typer.BadParameter(f"{reference!r} names no alias; write ADAPTER@ALIAS", param_hint="REFERENCE")
    request = registry_pb2.SetAdapterAliasRequest(
        name=alias_name(target.namespace, target.adapter, target.alias),
        targets=[resources_pb2.AliasTarget(version=version)],
    )
    response = run(lambda c: c.call(c.registry.SetAdapterAlias(request)), registry=registry)
    if json:
        return print_json(response.adapter)
    return typer.echo(f"{reference} → version {version}")


@app.command()
def delete(
    reference: Annotated[str, typer.Argument(help="[NAMESPACE/]ADAPTER")],
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Delete an adapter. Requests for it fail from now on; running ones finish."""
    target = _parse(reference)
    request = registry_pb2.DeleteAdapterRequest(name=adapter_name(target.namespace, target.adapter))
    response = run(lambda c: c.call(c.registry.DeleteAdapter(request)), registry=registry)
    if json:
        return print_json(response.adapter)
    return typer.echo(f"deleted: {response.adapter.name}")


@app.command()
def load(
    reference: ReferenceArgument,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it until it is unloaded.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return before it is ready.")] = False,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Load an adapter on one replica, ahead of its requests."""
    request = control_pb2.LoadAdapterRequest(reference=reference, pinned=pin, wait=not no_wait)
    with console.status("loading"):
        response = run(lambda c: c.call(c.control.LoadAdapter(request)), server=server)
    if json:
        return print_json(response.adapter)
    loaded = response.adapter
    return typer.echo(f"{'loading' if no_wait else 'loaded'}: {loaded.adapter_version} {megabytes(loaded.size_bytes)}")


@app.command()
def unload(
    reference: Annotated[str, typer.Argument(help="Reference, version name or sha256:HEX.")],
    force: Annotated[bool, typer.Option("--force", help="End its requests instead of waiting for them.")] = False,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Unload an adapter from one replica. Returns when its memory is free."""
    request = control_pb2.UnloadAdapterRequest(adapter=reference, force=force)
    with console.status("draining"):
        response = run(lambda c: c.call(c.control.UnloadAdapter(request)), server=server)
    if json:
        return print_json(response)
    return typer.echo(f"unloaded: {reference}, {megabytes(response.freed_bytes)} freed")


@app.command()
def convert(reference: ReferenceArgument) -> None:
    """Repair an adapter that was saved relative to a modified base model (not built yet)."""
    raise Unimplemented(
        f"converting {reference} is not built yet; re-save it with PEFT's path_initial_model_for_weight_conversion"
    )
