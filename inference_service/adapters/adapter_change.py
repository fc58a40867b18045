"""What the registry's watch tells of one adapter, and which references mean nothing since then."""

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import InvalidArgument
from shared.references import LATEST, parse_adapter_name, parse_alias_name, parse_reference, parse_version_name


class AdapterChange(NamedTuple):
    """The adapter `NAMESPACE/ADAPTER` is another one since `revision`.

    `deleted_versions` are gone for good: their numbers are not used again. `aliases`: all that there are; None if that
    was not told.
    """

    adapter: str
    revision: int
    is_deleted: bool = False
    deleted_versions: frozenset[int] = frozenset()
    aliases: frozenset[str] | None = None

    def ends(self, reference: str, versions: Sequence[int]) -> bool:
        """Whether a canonical reference to the adapter, which meant these versions before, means nothing any more, or
        something else than it did."""
        if self.is_deleted or not self.deleted_versions.isdisjoint(versions):
            return True
        alias = parse_reference(reference, "default").alias
        return self.aliases is not None and alias not in (None, LATEST) and alias not in self.aliases

    def ends_response(self, reference: str, response: bytes) -> bool:
        """The same of a serialized ResolveAdapterResponse; True for what is none."""
        try:
            versions = [parse_version_name(version.name, "name").version for version in target_versions(response)]
        except (DecodeError, InvalidArgument):
            return True
        return self.ends(reference, versions)


def read_change(change: registry_pb2.AdapterChange) -> AdapterChange:
    """Of the watch's message. Raises InvalidArgument for a malformed name."""
    name = parse_adapter_name(change.adapter.name, "changes.adapter.name")
    aliases = (parse_alias_name(alias.name, "changes.adapter.aliases.name").alias for alias in change.adapter.aliases)
    return AdapterChange(
        f"{name.namespace}/{name.adapter}",
        change.revision,
        change.type == registry_pb2.AdapterChange.TYPE_DELETE,
        frozenset([change.deleted_version] if change.deleted_version else ()),
        frozenset(aliases),
    )


def target_versions(response: bytes) -> list[resources_pb2.AdapterVersion]:
    """The versions that a serialized ResolveAdapterResponse names. Raises DecodeError."""
    answer = registry_pb2.ResolveAdapterResponse.FromString(response)
    return [target.version for target in answer.targets] or [answer.version]
