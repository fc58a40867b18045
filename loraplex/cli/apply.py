"""`loraplex apply`: make the registry hold what a file says. Applying twice changes nothing."""

import uuid
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress, print_json, print_table, run
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import LoraplexError
from shared.references import parse_reference


class AdapterEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One adapter of the file."""

    name: str
    source: str
    base_model: str
    aliases: list[str] = []
    labels: dict[str, str] = {}
    description: str = ""
    credential: str = ""


class AdaptersFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    adapters: list[AdapterEntry]


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML with a list `adapters`.", exists=True)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Register every adapter of a file. What is registered already stays as it is."""
    try:
        wanted = msgspec.yaml.decode(file.read_bytes(), type=AdaptersFile)
    except msgspec.MsgspecError as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="--file") from None
    rows = run(lambda client: _apply(client, wanted, dry_run), registry=registry)
    if json:
        print_json(rows)
    else:
        print_table(("ADAPTER", "RESULT", "VERSION", "DETAIL"), (tuple(row.values()) for row in rows))
    if any(row["result"] == "failed" for row in rows):
        raise typer.Exit(1)


async def _apply(client: Client, wanted: AdaptersFile, dry_run: bool) -> list[dict[str, Any]]:
    return [await _apply_one(client, entry, dry_run) for entry in wanted.adapters]


async def _apply_one(client: Client, entry: AdapterEntry, dry_run: bool) -> dict[str, Any]:
    try:
        target = parse_reference(entry.name, "default")
        request = registry_pb2.RegisterAdapterRequest(
            parent=f"namespaces/{target.namespace}",
            adapter_id=target.adapter,
            base_model=entry.base_model,
            source=resources_pb2.AdapterSource(uri=entry.source, credential_ref=entry.credential),
            aliases=entry.aliases,
            labels=entry.labels,
            description=entry.description,
            request_id=str(uuid.uuid4()),
            validate_only=dry_run,
        )
        response = await client.call(client.registry.RegisterAdapter(request))
    except LoraplexError as error:
        return {"adapter": entry.name, "result": "failed", "version": "-", "detail": f"{error.reason}: {error.message}"}
    result = "valid" if dry_run else ("registered" if response.created else "unchanged")
    version = response.version.name.rpartition("/")[2] or "-"
    return {"adapter": entry.name, "result": result, "version": version, "detail": response.version.digest}
