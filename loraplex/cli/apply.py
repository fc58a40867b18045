"""`loraplex apply`: make the registry hold what a file says. Applying twice changes nothing."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from loraplex.cli.adapter_update import updated
from loraplex.cli.adapters_file import AdapterEntry, WrongFile, read
from loraplex.cli.apply_changes import Registered, aliases, fields, meaning, own_aliases, targets
from loraplex.cli.calls import is_foreign, run
from loraplex.cli.names import parent, written
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress, parsed
from loraplex.cli.output import print_json, print_table, short_digest
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import AdapterNotFound, LoraplexError
from shared.references import LATEST, Reference, parse_version_name

ON_DEMAND = resources_pb2.Adapter.RESIDENCY_ON_DEMAND


class Row(NamedTuple):
    """What became of one entry. `version` is 0 and `digest` empty if there is none."""

    adapter: str
    result: str
    version: int
    digest: str
    detail: str


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file; its keys are above.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate, and say what would be done.")] = False,
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
      to register, to update   the same, with --dry-run
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
        cells = ((r.adapter, r.result, r.version or "-", short_digest(r.digest) or "-", r.detail or "-") for r in rows)
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
        registered: dict[int, Registered] = {}
        before = await _adapter(client, target)
        own = own_aliases({index: entries[index] for index in indices})
        for index in indices:
            try:
                if dry_run:
                    registered[index] = await _validated(client, target, entries[index], own[index], new=-1 - index)
                else:
                    registered[index] = await _registered(client, target, entries[index], own[index])
            except LoraplexError as error:
                if is_foreign(error):
                    raise
                rows[index] = Row(entries[index].name, "failed", 0, "", error.summary)
        is_whole = len(registered) == len(indices)
        if registered:
            doing = _Doing(client, target, before, dry_run)
            rows.update(await _finish(doing, registered, is_whole=is_whole, prune=prune))
    return [rows[index] for index in range(len(entries))]


async def _registered(client: Client, target: Reference, entry: AdapterEntry, own: Sequence[str]) -> Registered:
    """Registers the entry and points the aliases `own` at its version, both or neither."""
    response = await client.call(client.registry.RegisterAdapter(_request(target, entry, own)))
    return Registered(entry, _number(response.version), response.version.digest, response.created)


async def _validated(
    client: Client, target: Reference, entry: AdapterEntry, own: Sequence[str], *, new: int
) -> Registered:
    """What `_registered` would answer. A version that there is not yet has the number `new`, below 0."""
    request = _request(target, entry, own)
    request.validate_only = True
    response = await client.call(client.registry.RegisterAdapter(request))
    digest = response.version.digest
    if response.created:
        return Registered(entry, new, digest, created=True)
    known = registry_pb2.ResolveAdapterRequest(reference=written(target._replace(digest=digest)))
    resolved = await client.call(client.registry.ResolveAdapter(known))
    return Registered(entry, _number(resolved.version), digest, created=False)


def _request(target: Reference, entry: AdapterEntry, own: Sequence[str]) -> registry_pb2.RegisterAdapterRequest:
    return registry_pb2.RegisterAdapterRequest(
        parent=parent(target.namespace),
        adapter_id=target.adapter,
        base_model=entry.base_model,
        source=resources_pb2.AdapterSource(uri=entry.source, credential_ref=entry.credential),
        labels=entry.labels,
        description=entry.description or "",
        aliases=own,
        request_id=str(uuid.uuid4()),
    )


def _number(version: resources_pb2.AdapterVersion) -> int:
    return parse_version_name(version.name, "version.name").version


class _Doing(NamedTuple):
    """What is done to one adapter, or with `dry_run` only said. `before`: as it was, without a name if it was not."""

    client: Client
    target: Reference
    before: resources_pb2.Adapter
    dry_run: bool

    async def now(self, registered: dict[int, Registered]) -> resources_pb2.Adapter:
        """The adapter after its entries were registered, or as it would be then, but for its aliases."""
        if not self.dry_run:
            return await _adapter(self.client, self.target)
        if self.before.name:
            return self.before
        first = next(iter(registered.values())).entry
        return resources_pb2.Adapter(
            labels=first.labels, description=first.description or "", default_alias=LATEST, residency=ON_DEMAND
        )

    async def set_alias(self, alias: str, wanted: dict[int, float]) -> None:
        if not self.dry_run:
            await _set_alias(self.client, self.target, alias, wanted)

    async def delete_alias(self, alias: str) -> None:
        if not self.dry_run:
            await _delete_alias(self.client, self.target, alias)

    async def update(self, adapter: resources_pb2.Adapter, changed: dict[str, Any]) -> resources_pb2.Adapter:
        if not self.dry_run:
            return await updated(self.client, resources_pb2.Adapter(name=adapter.name, **changed), list(changed))
        for field in changed:
            adapter.ClearField(field)  # type: ignore[arg-type]  # a field's name
        adapter.MergeFrom(resources_pb2.Adapter(**changed))
        return adapter


async def _finish(doing: _Doing, registered: dict[int, Registered], *, is_whole: bool, prune: bool) -> dict[int, Row]:
    """Sets what the entries of one adapter say of it and their registrations have not. `is_whole`: none has failed."""
    changes: dict[int, list[str]] = {index: [] for index in registered}
    listed = aliases(registered)
    extra: list[str] = []
    try:
        adapter = await doing.now(registered)
        for alias, meant in listed.items():
            wanted = {number: weight for number, weight, _ in meant}
            if targets(adapter).get(alias) != wanted:
                await doing.set_alias(alias, wanted)
            if targets(doing.before).get(alias) != wanted:
                for _, _, index in meant:
                    changes[index].append(f"{alias}→{meaning(wanted)}")
        for index, each in registered.items():
            if changed := fields(each.entry, adapter):
                adapter = await doing.update(adapter, changed)
                changes[index] += changed
        if is_whole and any(each.entry.aliases is not None for each in registered.values()):
            extra = sorted(targets(adapter).keys() - listed.keys())
        if extra and prune:
            for alias in extra:
                await doing.delete_alias(alias)
            changes[next(iter(registered))] += [f"{alias} taken away" for alias in extra]
            extra = []
    except LoraplexError as error:
        if is_foreign(error):
            raise
        return {i: Row(e.entry.name, "failed", e.version, e.digest, error.summary) for i, e in registered.items()}
    return {index: _row(each, changes[index], extra, doing.dry_run) for index, each in registered.items()}


def _row(registered: Registered, changes: list[str], extra: list[str], dry_run: bool) -> Row:
    entry, version, digest, created = registered
    done = ("to register", "to update") if dry_run else ("registered", "updated")
    result = done[0] if created else done[1] if changes else "unchanged"
    if not extra or entry.aliases is None:
        return Row(entry.name, result, max(version, 0), digest, "; ".join(changes))
    details = [result, *changes, f"aliases that are not listed: {', '.join(extra)} (--prune takes them away)"]
    return Row(entry.name, "differs", max(version, 0), digest, "; ".join(details))


async def _adapter(client: Client, target: Reference) -> resources_pb2.Adapter:
    """The adapter, or one without a name where there is none."""
    request = registry_pb2.GetAdapterRequest(name=written(target))
    try:
        return await client.call(client.registry.GetAdapter(request))
    except AdapterNotFound:
        return resources_pb2.Adapter()


async def _set_alias(client: Client, target: Reference, alias: str, wanted: dict[int, float]) -> None:
    request = registry_pb2.SetAdapterAliasRequest(
        name=written(target._replace(alias=alias)),
        targets=[resources_pb2.AliasTarget(version=number, weight=weight) for number, weight in wanted.items()],
    )
    await client.call(client.registry.SetAdapterAlias(request))


async def _delete_alias(client: Client, target: Reference, alias: str) -> None:
    name = written(target._replace(alias=alias))
    await client.call(client.registry.DeleteAdapterAlias(registry_pb2.DeleteAdapterAliasRequest(name=name)))
