"""`loraplex apply`: make the registry hold what a file says. Applying twice changes nothing."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from loraplex.cli.adapter_update import RESIDENCIES, Residency, updated
from loraplex.cli.adapters_file import AdapterEntry, WrongFile, read
from loraplex.cli.calls import is_foreign, run
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress, parsed
from loraplex.cli.output import print_json, print_table
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import AdapterNotFound, LoraplexError
from shared.references import Reference, adapter_name, alias_name, namespace_name


class Row(NamedTuple):
    """What became of one entry. `version` is 0 and `digest` empty if there is none."""

    adapter: str
    result: str
    version: int
    digest: str
    detail: str


class _Registered(NamedTuple):
    """An entry that the registry has taken. `version` is 0 if it was only validated."""

    entry: AdapterEntry
    version: int
    digest: str
    created: bool


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file; its keys are above.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Take away aliases that the file does not list.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Make every adapter of a YAML file what the file says. What is so already stays as it is.

    \b
    adapters:
      - name: refunds                      # [NAMESPACE/]ADAPTER
        base_model: smollm2-135m-instruct  # id of a registered base model
        source: file://store/refunds       # file://ROOT/path, ROOT a --file-root
        aliases: [prod, stable]            # optional: point at this version
        labels: {team: support}            # optional
        annotations: {owner: mail@team}    # optional
        description: Answers on refunds.   # optional
        default_alias: prod                # optional: what the name alone means
        residency: preload                 # optional: on-demand, preload, pinned
      - name: pirate
        base_model: smollm2-135m-instruct
        source: file://store/pirate
        aliases: {prod: 9}                 # share of the requests, by weight
      - name: pirate
        base_model: smollm2-135m-instruct
        source: file://store/pirate-next
        aliases: {prod: 1}

    A key that is left out is left as it is. Entries of one adapter with several sources are its versions; its aliases
    are then those of all of them.

    \b
    Results:
      registered  a new version
      updated     a known version; the adapter or an alias was changed
      unchanged   all is as the file says
      valid       with --dry-run: it could be registered
      differs     there are aliases that the file does not list: --prune takes
                  them away; exit status 1
      failed      refused, for the reason given; exit status 1
    """
    try:
        entries = read(file)
    except WrongFile as error:
        raise typer.BadParameter(str(error), param_hint="--file") from None
    rows = run(lambda client: _apply(client, entries, dry_run, prune), registry=registry)
    if json:
        print_json([row._asdict() for row in rows])
    else:
        cells = ((row.adapter, row.result, row.version or "-", row.digest or "-", row.detail or "-") for row in rows)
        print_table(("ADAPTER", "RESULT", "VERSION", "DIGEST", "DETAIL"), cells, fold="DETAIL")
    if any(row.result in ("failed", "differs") for row in rows):
        raise typer.Exit(1)


async def _apply(client: Client, entries: Sequence[AdapterEntry], dry_run: bool, prune: bool) -> list[Row]:
    """Rows in the file's order. An adapter's entries are registered, each with the aliases that are its alone; then
    what they share, and fields, are set."""
    rows: dict[int, Row] = {}
    adapters: dict[Reference, list[int]] = {}
    for index, entry in enumerate(entries):
        adapters.setdefault(parsed(entry.name), []).append(index)
    for target, indices in adapters.items():
        registered: dict[int, _Registered] = {}
        before = await _known_aliases(client, target)
        own = _own_aliases({index: entries[index] for index in indices})
        for index in indices:
            result = await _register(client, target, entries[index], own[index], dry_run)
            if isinstance(result, Row):
                rows[index] = result
            else:
                registered[index] = result
        if dry_run:
            rows.update(
                {index: Row(each.entry.name, "valid", 0, each.digest, "") for index, each in registered.items()}
            )
            continue
        is_whole = len(registered) == len(indices)
        rows.update(await _finish(client, target, registered, before, is_whole=is_whole, prune=prune))
    return [rows[index] for index in range(len(entries))]


async def _register(
    client: Client, target: Reference, entry: AdapterEntry, aliases: Sequence[str], dry_run: bool
) -> "_Registered | Row":
    """Registers the entry and points `aliases` at its version, both or neither."""
    request = registry_pb2.RegisterAdapterRequest(
        parent=namespace_name(target.namespace),
        adapter_id=target.adapter,
        base_model=entry.base_model,
        source=resources_pb2.AdapterSource(uri=entry.source, credential_ref=entry.credential),
        labels=entry.labels,
        description=entry.description or "",
        aliases=aliases,
        request_id=str(uuid.uuid4()),
        validate_only=dry_run,
    )
    try:
        response = await client.call(client.registry.RegisterAdapter(request))
    except LoraplexError as error:
        if is_foreign(error):
            raise
        return Row(entry.name, "failed", 0, "", error.summary)
    number = int(response.version.name.rpartition("/")[2] or 0)
    return _Registered(entry, number, response.version.digest, response.created)


async def _finish(
    client: Client,
    target: Reference,
    registered: dict[int, _Registered],
    before: dict[str, dict[int, float]],
    *,
    is_whole: bool,
    prune: bool,
) -> dict[int, Row]:
    """Sets what the entries of one adapter say of it and their registrations have not.

    `before`: what its aliases meant. `is_whole`: none of the entries failed.
    """
    if not registered:
        return {}
    changes: dict[int, list[str]] = {index: [] for index in registered}
    extra: list[str] = []
    try:
        adapter = await _adapter(client, target)
        for alias, targets in _aliases(registered).items():
            wanted = {number: weight for number, weight, _ in targets}
            if _targets(adapter).get(alias) != wanted:
                adapter = await _set_alias(client, target, alias, wanted)
            if before.get(alias) != wanted:
                for number, _, index in targets:
                    changes[index].append(f"{alias}→{number}")
        for index, each in registered.items():
            if fields := _fields(each.entry, adapter):
                adapter = await updated(client, _adapter_with(adapter, fields), list(fields))
                changes[index] += fields
        if is_whole and any(each.entry.aliases is not None for each in registered.values()):
            extra = sorted(_targets(adapter).keys() - _aliases(registered).keys())
        if extra and prune:
            for alias in extra:
                await _delete_alias(client, target, alias)
            changes[next(iter(registered))] += [f"{alias} taken away" for alias in extra]
            extra = []
    except LoraplexError as error:
        if is_foreign(error):
            raise
        return {i: Row(e.entry.name, "failed", e.version, e.digest, error.summary) for i, e in registered.items()}
    return {index: _row(each, changes[index], extra) for index, each in registered.items()}


def _row(registered: _Registered, changes: list[str], extra: list[str]) -> Row:
    entry, version, digest, created = registered
    result = "registered" if created else "updated" if changes else "unchanged"
    if not extra or entry.aliases is None:
        return Row(entry.name, result, version, digest, "; ".join(changes))
    details = [result, *changes, f"aliases that are not listed: {', '.join(extra)} (--prune takes them away)"]
    return Row(entry.name, "differs", version, digest, "; ".join(details))


def _aliases(registered: dict[int, _Registered]) -> dict[str, list[tuple[int, float, int]]]:
    """By alias: (version, weight, index of the entry). Weighted ones share; of plain ones the last entry has it."""
    found: dict[str, list[tuple[int, float, int]]] = {}
    for index, each in registered.items():
        if isinstance(each.entry.aliases, dict):
            for alias, weight in each.entry.aliases.items():
                others = [other for other in found.get(alias, []) if other[0] != each.version]
                found[alias] = [*others, (each.version, weight, index)]
        else:
            found.update({alias: [(each.version, 1.0, index)] for alias in each.entry.aliases or ()})
    return found


def _own_aliases(entries: dict[int, AdapterEntry]) -> dict[int, list[str]]:
    """The aliases that shall mean one entry's version and nothing else, by entry. As `_aliases`, before there are
    versions."""
    shares: dict[str, dict[int, float]] = {}
    for index, entry in entries.items():
        if isinstance(entry.aliases, dict):
            for alias, weight in entry.aliases.items():
                shares.setdefault(alias, {})[index] = weight
        else:
            shares.update({alias: {index: 1.0} for alias in entry.aliases or ()})
    return {index: [alias for alias, share in shares.items() if share == {index: 1.0}] for index in entries}


def _targets(adapter: resources_pb2.Adapter) -> dict[str, dict[int, float]]:
    return {a.name.rpartition("/")[2]: {t.version: t.weight for t in a.targets} for a in adapter.aliases}


def _fields(entry: AdapterEntry, adapter: resources_pb2.Adapter) -> dict[str, Any]:
    """Fields of the adapter that are other than the entry says, and what it says."""
    wanted = {
        "description": entry.description,
        "labels": entry.labels,
        "annotations": entry.annotations,
        "default_alias": entry.default_alias,
        "residency": None if entry.residency is None else RESIDENCIES[Residency(entry.residency)],
    }
    return {
        field: value
        for field, value in wanted.items()
        if value is not None
        and (dict(getattr(adapter, field)) if isinstance(value, dict) else getattr(adapter, field)) != value
    }


def _adapter_with(adapter: resources_pb2.Adapter, fields: dict[str, Any]) -> resources_pb2.Adapter:
    return resources_pb2.Adapter(name=adapter.name, **fields)


async def _adapter(client: Client, target: Reference) -> resources_pb2.Adapter:
    request = registry_pb2.GetAdapterRequest(name=adapter_name(target.namespace, target.adapter))
    return await client.call(client.registry.GetAdapter(request))


async def _known_aliases(client: Client, target: Reference) -> dict[str, dict[int, float]]:
    """What the adapter's aliases mean; none if it is new."""
    try:
        return _targets(await _adapter(client, target))
    except AdapterNotFound:
        return {}


async def _set_alias(client: Client, target: Reference, alias: str, targets: dict[int, float]) -> resources_pb2.Adapter:
    request = registry_pb2.SetAdapterAliasRequest(
        name=alias_name(target.namespace, target.adapter, alias),
        targets=[resources_pb2.AliasTarget(version=number, weight=weight) for number, weight in targets.items()],
    )
    return (await client.call(client.registry.SetAdapterAlias(request))).adapter


async def _delete_alias(client: Client, target: Reference, alias: str) -> None:
    name = alias_name(target.namespace, target.adapter, alias)
    await client.call(client.registry.DeleteAdapterAlias(registry_pb2.DeleteAdapterAliasRequest(name=name)))
