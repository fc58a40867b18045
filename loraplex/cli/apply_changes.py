"""What an adapters file wants, and what of it is otherwise."""

from typing import Any, NamedTuple

from loraplex.cli.adapter_update import RESIDENCIES
from loraplex.cli.adapters_file import AdapterEntry
from loraplex.registry.v1 import resources_pb2


class Registered(NamedTuple):
    """An entry that the registry has taken, or would take. `version` is below 1 where there is none yet."""

    entry: AdapterEntry
    version: int
    digest: str
    created: bool


def aliases(registered: dict[int, Registered]) -> dict[str, list[tuple[int, float, int]]]:
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


def own_aliases(entries: dict[int, AdapterEntry]) -> dict[int, list[str]]:
    """The aliases that shall mean one entry's version and nothing else, by entry. As `aliases`, before there are
    versions."""
    shares: dict[str, dict[int, float]] = {}
    for index, entry in entries.items():
        if isinstance(entry.aliases, dict):
            for alias, weight in entry.aliases.items():
                shares.setdefault(alias, {})[index] = weight
        else:
            shares.update({alias: {index: 1.0} for alias in entry.aliases or ()})
    return {index: [alias for alias, share in shares.items() if share == {index: 1.0}] for index in entries}


def targets(adapter: resources_pb2.Adapter) -> dict[str, dict[int, float]]:
    """What an adapter's aliases mean: weights by version."""
    return {a.name.rpartition("/")[2]: {t.version: t.weight for t in a.targets} for a in adapter.aliases}


def meaning(wanted: dict[int, float]) -> str:
    """What an alias means, from weights by version: the version, or all as VERSION:WEIGHT."""
    names = {number: str(number) if number > 0 else "new" for number in wanted}
    if len(wanted) == 1:
        return next(iter(names.values()))
    return "+".join(f"{names[number]}:{weight:g}" for number, weight in wanted.items())


def fields(entry: AdapterEntry, adapter: resources_pb2.Adapter) -> dict[str, Any]:
    """Fields of the adapter that are other than the entry says, and what it says."""
    wanted = {
        "description": entry.description,
        "labels": entry.labels,
        "annotations": entry.annotations,
        "default_alias": entry.default_alias,
        "residency": None if entry.residency is None else RESIDENCIES[entry.residency],
    }
    return {
        field: value
        for field, value in wanted.items()
        if value is not None
        and (dict(getattr(adapter, field)) if isinstance(value, dict) else getattr(adapter, field)) != value
    }
