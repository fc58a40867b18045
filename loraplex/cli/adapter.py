"""`loraplex adapter`: what the registry knows of adapters. `adapter_memory` adds `load` and `unload`."""

import sys
import uuid
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.calls import run
from loraplex.cli.identity import own_namespace
from loraplex.cli.names import parent, written
from loraplex.cli.options import (
    DEFAULT_REGISTRY,
    AdapterArgument,
    FilterOption,
    Json,
    OrderOption,
    ReferenceArgument,
    RegistryAddress,
    VersionFilterOption,
    VersionOrderOption,
    key_values,
    names_version,
    parsed,
    parsed_adapter,
)
from loraplex.cli.output import (
    alias_targets,
    as_dict,
    megabytes,
    moment,
    print_json,
    print_table,
    short_adapter,
    short_digest,
    short_version,
)
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.adapter_format.texts import MAX_BYTES, SPECIAL_TOKENS, TOKENIZER_CONFIG
from shared.errors import AdapterNotFound
from shared.references import LATEST

app = typer.Typer(help="Manage adapters.")
console = Console(stderr=True)


@app.command()
def register(
    adapter: AdapterArgument,
    base_model: Annotated[str, typer.Option(help="Base model id.")],
    source: Annotated[str, typer.Option(help="file://ROOT/path, hf://org/repo or s3://bucket/prefix.")],
    alias: Annotated[list[str], typer.Option(help="Point this alias at the version; repeatable.")] = [],  # noqa: B006
    label: Annotated[list[str], typer.Option(help="K=V; repeatable. Used when the adapter is new.")] = [],  # noqa: B006
    description: Annotated[str, typer.Option(help="What it is for. Used when the adapter is new.")] = "",
    credential: Annotated[str, typer.Option(help="Name of a credential in the services' configuration.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Validate an adapter and store it as a version."""
    target = parsed_adapter(adapter)
    request = registry_pb2.RegisterAdapterRequest(
        parent=parent(target.namespace),
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
    if json and dry_run:  # of a version that was only validated the registry says whether it would be a new one
        return print_json({**as_dict(response), "created": False, "validated": True})
    if json:
        return print_json(response)
    return _print_registered(adapter, response, dry_run)


def _print_registered(adapter: str, response: registry_pb2.RegisterAdapterResponse, dry_run: bool) -> None:
    verb = "valid" if dry_run else ("registered" if response.created else "already registered")
    version = response.version
    typer.echo(
        f"{verb}: {short_version(version.name) or adapter} rank {version.lora_config.rank}, "
        f"{megabytes(version.size_bytes)}, {version.digest}"
    )
    if not dry_run:
        _print_meaning(response.adapter, version.name)
    _print_warnings(version)


def _print_meaning(adapter: resources_pb2.Adapter, version: str) -> None:
    """Tells whoever asks for the name alone, and expects what was just registered, that it means something else."""
    number, name = version.rpartition("/")[2], short_adapter(adapter.name)
    aliases = {alias.name.rpartition("/")[2]: alias_targets(alias) for alias in adapter.aliases}
    default = adapter.default_alias
    meaning = str(adapter.latest_version) if default == LATEST else aliases.get(default, "none")
    if meaning == number:
        return
    if default == LATEST:
        moved = f"loraplex adapter alias {name}@prod {number}"
        both = f"`{moved}` and `loraplex adapter update {name} --default-alias prod`"
        typer.echo(f"{name} alone means the newest version, {meaning}; {both} make it mean {number}", err=True)
    else:
        point = f"`loraplex adapter alias {name}@{default} {number}`"
        typer.echo(f"{name} alone means {name}@{default}, version {meaning}; {point} makes it mean {number}", err=True)


def _print_warnings(version: resources_pb2.AdapterVersion) -> None:
    for warning in version.warnings:
        typer.echo(f"warning: {warning}", err=True)


@app.command("list")
def list_adapters(
    namespace: Annotated[str, typer.Option(help="Namespace; - for all.")] = "",
    filter: FilterOption = "",
    order_by: OrderOption = "",
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted ones too.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """List adapters, and the replicas that have them ready. Rank and size are of the version that the name alone means.

    One that is ON_DEMAND need not be ready: its first request loads it.
    """
    request = registry_pb2.ListAdaptersRequest(
        parent=parent(namespace or own_namespace()), filter=filter, order_by=order_by, show_deleted=deleted
    )

    async def all_adapters(client: Client) -> list[resources_pb2.Adapter]:
        return [a async for page in client.pages(client.registry.ListAdapters, request) for a in page.adapters]

    adapters = run(all_adapters, registry=registry)
    if json:
        return print_json(adapters)
    return print_table(
        ("ADAPTER", "LATEST", "VERSIONS", "ALIASES", "BASE MODEL", "RANK", "SIZE", "READY", "DESCRIPTION"),
        (
            (
                short_adapter(a.name) + (" (deleted)" if a.HasField("delete_time") else ""),
                a.latest_version or "-",
                a.num_versions,
                _aliases(a),
                a.base_model.removeprefix("baseModels/"),
                a.default_version.rank or "-",
                megabytes(a.default_version.size_bytes) if a.HasField("default_version") else "-",
                _ready_or_why(a),
                a.description or "-",
            )
            for a in adapters
        ),
        fold="DESCRIPTION",
        spare=("DESCRIPTION", "BASE MODEL", "VERSIONS"),
    )


def _aliases(adapter: resources_pb2.Adapter) -> str:
    return ", ".join(f"{a.name.rpartition('/')[2]}→{alias_targets(a)}" for a in adapter.aliases) or "-"


def _ready(adapter: resources_pb2.Adapter) -> str:
    return f"{adapter.serving.ready_replicas}/{adapter.serving.target_replicas}"


def _ready_or_why(adapter: resources_pb2.Adapter) -> str:
    """As `_ready`, and in one word each what keeps the others from it: ON_DEMAND, where nothing is wrong."""
    return " ".join([_ready(adapter), ", ".join(sorted({each.reason for each in adapter.serving.not_ready}))]).strip()


@app.command()
def show(reference: ReferenceArgument, json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY) -> None:
    """Show an adapter and the version that a reference means. A deleted one is shown without."""
    target = parsed(reference)

    async def both(client: Client) -> tuple[resources_pb2.Adapter, registry_pb2.ResolveAdapterResponse]:
        name = written(target._replace(version=None, alias=None, digest=None))
        adapter = await client.call(client.registry.GetAdapter(registry_pb2.GetAdapterRequest(name=name)))
        resolve = registry_pb2.ResolveAdapterRequest(reference=written(target))
        try:
            return adapter, await client.call(client.registry.ResolveAdapter(resolve))
        except AdapterNotFound:
            if names_version(target):
                raise
            return adapter, registry_pb2.ResolveAdapterResponse()

    adapter, resolved = run(both, registry=registry)
    if json:
        return print_json({"adapter": as_dict(adapter), "resolved": as_dict(resolved)})
    version = _of_version(resolved.version) if resolved.HasField("version") else {}
    print_table(("", ""), [*_of_adapter(adapter), *version.items()])
    if modules := resolved.version.lora_config.modules:
        typer.echo("")
        print_table(("MODULE", "LAYERS", "RANK", "SCALE", "KINDS", "TENSORS", "BYTES"), map(_module, modules))
    _print_warnings(resolved.version)
    return None


def _module(module: resources_pb2.AdaptedModule) -> tuple[object, ...]:
    return (
        module.module,
        module.layers or "-",
        module.rank or "-",
        f"{module.scale:g}" if module.rank else "-",
        ", ".join(module.kinds) or "copy",
        module.num_tensors,
        megabytes(module.device_bytes),
    )


def _of_adapter(adapter: resources_pb2.Adapter) -> Iterator[tuple[str, object]]:
    yield "adapter", adapter.name
    if adapter.HasField("delete_time"):
        yield "deleted", moment(adapter.delete_time)
        yield "purged after", moment(adapter.purge_time)
    yield "base model", adapter.base_model
    yield "ready replicas", _ready(adapter)
    yield from _not_ready(adapter)
    yield "residency", resources_pb2.Adapter.Residency.Name(adapter.residency).removeprefix("RESIDENCY_")
    yield "aliases", _aliases(adapter)
    yield "default alias", adapter.default_alias
    yield "description", adapter.description or "-"
    yield "labels", ", ".join(f"{k}={v}" for k, v in sorted(adapter.labels.items())) or "-"


def _not_ready(adapter: resources_pb2.Adapter) -> Iterator[tuple[str, str]]:
    """What keeps replicas from being ready: a row for each reason, then which ones."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for each in adapter.serving.not_ready:
        by_reason.setdefault((each.reason, each.message), []).append(each.replica)
    for at, ((reason, message), replicas) in enumerate(by_reason.items()):
        yield "" if at else "not ready", f"{reason}: {message} ({', '.join(replicas)})"
    if not by_reason:
        yield "not ready", "-"


def _of_version(version: resources_pb2.AdapterVersion) -> dict[str, object]:
    config = version.lora_config
    texts = [file.path for file in version.manifest.files if file.path in MAX_BYTES]
    names_eos = not {TOKENIZER_CONFIG, SPECIAL_TOKENS}.isdisjoint(texts)
    return {
        "version": version.name.rpartition("/")[2],
        "digest": version.digest,
        "source": version.source.uri,
        "files": megabytes(version.size_bytes),
        "on a device, 16 bit": megabytes(config.device_bytes),
        "rank": config.rank,
        "alpha": f"{config.alpha:g}" + (" (rsLoRA)" if config.use_rslora else ""),
        "kinds": ", ".join(config.kinds),
        "targets": ", ".join(config.target_modules) or "-",
        "modules": config.num_modules,
        "own text": ", ".join(texts) or "-",
        "ends at": "the base model's end of sequence" + (" and its own eos_token" if names_eos else ""),
    }


@app.command()
def versions(
    adapter: AdapterArgument,
    filter: VersionFilterOption = "",
    order_by: VersionOrderOption = "",
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted ones too.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """List the versions of an adapter. By default the newest is first."""
    target = parsed_adapter(adapter)
    request = registry_pb2.ListAdapterVersionsRequest(
        parent=written(target), filter=filter, order_by=order_by, show_deleted=deleted
    )

    async def all_versions(client: Client) -> list[resources_pb2.AdapterVersion]:
        return [v async for page in client.pages(client.registry.ListAdapterVersions, request) for v in page.versions]

    found = run(all_versions, registry=registry)
    if json:
        return print_json(found)
    return print_table(
        ("VERSION", "STATE", "RANK", "SIZE", "DIGEST", "CREATED", "SOURCE"),
        (
            (
                short_version(v.name),
                resources_pb2.AdapterVersion.State.Name(v.state).removeprefix("STATE_"),
                v.lora_config.rank or "-",
                megabytes(v.size_bytes),
                short_digest(v.digest),
                moment(v.create_time),
                v.source.uri,
            )
            for v in found
        ),
        spare=("CREATED", "SIZE"),
    )


@app.command()
def delete(
    adapter: AdapterArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Only a terminal is asked.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Delete an adapter. New requests fail within a second, running ones finish. `undelete` brings it back."""
    target = parsed_adapter(adapter)
    name = written(target)
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete {name}? Requests for it will fail.", abort=True, err=True)
    request = registry_pb2.DeleteAdapterRequest(name=name)
    response = run(lambda c: c.call(c.registry.DeleteAdapter(request)), registry=registry)
    if json:
        return print_json(response.adapter)
    return typer.echo(f"deleted: {response.adapter.name}")


@app.command()
def undelete(adapter: AdapterArgument, json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY) -> None:
    """Bring a deleted adapter back, versions and aliases too."""
    target = parsed_adapter(adapter)
    request = registry_pb2.UndeleteAdapterRequest(name=written(target))
    response = run(lambda c: c.call(c.registry.UndeleteAdapter(request)), registry=registry)
    if json:
        return print_json(response.adapter)
    return typer.echo(f"undeleted: {response.adapter.name}")
