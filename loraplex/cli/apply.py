"""`loraplex apply`: make the registry hold what a file says. Applying twice changes nothing."""

import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from loraplex.cli.adapters_file import AdapterEntry, WrongFile, read
from loraplex.cli.calls import is_foreign, run
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress, parsed
from loraplex.cli.output import print_json, print_table
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import AdapterNotFound, LoraplexError
from shared.references import Reference, adapter_name, namespace_name


class Row(NamedTuple):
    """What became of one entry. `version` is 0 and `digest` empty if there is none."""

    adapter: str
    result: str
    version: int
    digest: str
    detail: str


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file; its keys are above.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Register every adapter of a YAML file and point its aliases. What is so already stays as it is.

    \b
    adapters:
      - name: refunds                      # [NAMESPACE/]ADAPTER
        base_model: smollm2-135m-instruct  # id of a registered base model
        source: file://store/refunds       # file://ROOT/path, ROOT a --file-root
        aliases: [prod, stable]            # optional: point at this version
        labels: {team: support}            # optional
        description: Answers on refunds.   # optional
      - name: pirate
        base_model: smollm2-135m-instruct
        source: file://store/pirate

    A key that is left out is left as it is. Entries of one adapter with several sources are its versions; its aliases
    are then those of all of them.

    \b
    Results:
      registered  a new version
      updated     a known version; an alias was moved to it
      unchanged   all is as the file says
      valid       with --dry-run: it could be registered
      differs     description, labels or further aliases are not as the file
                  says, and cannot be changed yet; exit status 1
      failed      refused, for the reason given; exit status 1
    """
    try:
        entries = read(file)
    except WrongFile as error:
        raise typer.BadParameter(str(error), param_hint="--file") from None
    rows = run(lambda client: _apply(client, entries, dry_run), registry=registry)
    if json:
        print_json([row._asdict() for row in rows])
    else:
        cells = ((row.adapter, row.result, row.version or "-", row.digest or "-", row.detail or "-") for row in rows)
        print_table(("ADAPTER", "RESULT", "VERSION", "DIGEST", "DETAIL"), cells, fold="DETAIL")
    if any(row.result in ("failed", "differs") for row in rows):
        raise typer.Exit(1)


async def _apply(client: Client, entries: list[AdapterEntry], dry_run: bool) -> list[Row]:
    aliases: dict[Reference, set[str]] = defaultdict(set)
    for entry in entries:
        aliases[parsed(entry.name)].update(entry.aliases or ())
    return [await _apply_one(client, entry, aliases[parsed(entry.name)], dry_run) for entry in entries]


async def _apply_one(client: Client, entry: AdapterEntry, all_aliases: set[str], dry_run: bool) -> Row:
    """Applies one entry. `all_aliases` are those that the file gives its adapter, here or in other entries."""
    target = parsed(entry.name)
    request = _request(entry, target, dry_run)
    try:
        before = await _aliases_before(client, target)
        response = await client.call(client.registry.RegisterAdapter(request))
    except LoraplexError as error:
        if is_foreign(error):
            raise
        return Row(entry.name, "failed", 0, "", error.summary)
    number = int(response.version.name.rpartition("/")[2] or 0)
    moved = [alias for alias in entry.aliases or () if not dry_run and before.get(alias) != {number}]
    differing = _differing(entry, all_aliases, response.adapter)
    result = "valid" if dry_run else "registered" if response.created else "updated" if moved else "unchanged"
    details = [f"{alias}→{number}" for alias in moved]
    if differing:
        details = [result, *details, f"not as the file says, and cannot be changed yet: {', '.join(differing)}"]
        result = "differs"
    return Row(entry.name, result, number, response.version.digest, "; ".join(details))


def _request(entry: AdapterEntry, target: Reference, dry_run: bool) -> registry_pb2.RegisterAdapterRequest:
    return registry_pb2.RegisterAdapterRequest(
        parent=namespace_name(target.namespace),
        adapter_id=target.adapter,
        base_model=entry.base_model,
        source=resources_pb2.AdapterSource(uri=entry.source, credential_ref=entry.credential),
        aliases=entry.aliases,
        labels=entry.labels,
        description=entry.description or "",
        request_id=str(uuid.uuid4()),
        validate_only=dry_run,
    )


async def _aliases_before(client: Client, target: Reference) -> Mapping[str, set[int]]:
    request = registry_pb2.GetAdapterRequest(name=adapter_name(target.namespace, target.adapter))
    try:
        return _alias_targets(await client.call(client.registry.GetAdapter(request)))
    except AdapterNotFound:
        return {}


def _alias_targets(adapter: resources_pb2.Adapter) -> dict[str, set[int]]:
    return {alias.name.rpartition("/")[2]: {t.version for t in alias.targets} for alias in adapter.aliases}


def _differing(entry: AdapterEntry, all_aliases: set[str], adapter: resources_pb2.Adapter) -> list[str]:
    """What of the adapter is not as the entry says, though the entry was applied."""
    differing = []
    if entry.description is not None and entry.description != adapter.description:
        differing.append("description")
    if entry.labels is not None and entry.labels != dict(adapter.labels):
        differing.append("labels")
    further = sorted(_alias_targets(adapter).keys() - all_aliases)
    if entry.aliases is not None and further:
        differing.append(f"aliases ({', '.join(further)} not listed)")
    return differing
