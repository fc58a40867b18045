"""Which versions of an adapter a replica shall hold, as the registry's watch tells of the adapter."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.references import LATEST, parse_version_name


class Wanted(NamedTuple):
    """One content that this replica shall hold. `reference`: `NS/ADAPTER@N`."""

    digest: str
    reference: str
    is_pinned: bool


def wanted_versions(change: registry_pb2.AdapterChange) -> tuple[Wanted, ...]:
    """What of an adapter a replica shall hold.

    Raises:
        InvalidArgument: a version's name is malformed.
    """
    adapter = change.adapter
    residency = resources_pb2.Adapter.Residency
    if adapter.residency not in (residency.RESIDENCY_PRELOAD, residency.RESIDENCY_PINNED):
        return ()
    numbers = {target.version for alias in adapter.aliases for target in alias.targets}
    if adapter.default_alias == LATEST:
        numbers.add(adapter.latest_version)
    found = []
    for version in change.versions:
        name = parse_version_name(version.name, "changes.versions.name")
        if name.version in numbers:
            reference = f"{name.namespace}/{name.adapter}@{name.version}"
            found.append(Wanted(version.digest, reference, adapter.residency == residency.RESIDENCY_PINNED))
    return tuple(found)


def wanted_by_digest(wanted: Mapping[str, Sequence[Wanted]]) -> dict[str, Wanted]:
    """Several adapters may be of one content: it is pinned if one of them is."""
    found: dict[str, Wanted] = {}
    for versions in wanted.values():
        for version in versions:
            if version.digest not in found or version.is_pinned:
                found[version.digest] = version
    return found
