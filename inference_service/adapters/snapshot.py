"""What the watch's snapshot tells of adapters, by which answers of before are confirmed."""

from google.protobuf.message import DecodeError

from inference_service.adapters.resolution import Resolution
from loraplex.registry.v1 import registry_pb2


class Snapshot:
    """The versions that a snapshot has told, by name and content."""

    def __init__(self) -> None:
        self._versions: set[tuple[str, str]] = set()  # resource name, digest

    def add(self, name: str, digest: str) -> None:
        """The version `name` has this content."""
        self._versions.add((name, digest))

    def confirms(self, resolution: Resolution) -> bool:
        """Whether each version that the answer names was told, with the same content."""
        return all((version.name, version.digest) in self._versions for version, _ in resolution.targets)

    def confirms_response(self, response: bytes) -> bool:
        """The same of a serialized ResolveAdapterResponse; False for what is none."""
        try:
            answer = registry_pb2.ResolveAdapterResponse.FromString(response)
        except DecodeError:
            return False
        versions = [target.version for target in answer.targets] or [answer.version]
        return all((version.name, version.digest) in self._versions for version in versions)
