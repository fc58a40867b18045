"""What was learnt of adapters by digest since the process started: their names, and how large they are."""

from collections import OrderedDict

from inference_service.adapters.blend import Blend
from inference_service.adapters.names import AdapterNames
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.types import BlobLayout
from shared.references import parse_reference, parse_version_name

MAX_KNOWN = 50_000


class _Known:
    """The versions that have a digest, last resolved last, or the blend that has it; its layout once it was read."""

    def __init__(self) -> None:
        self.versions: dict[str, ResolvedVersion] = {}
        self.blend: Blend | None = None
        self.layout: BlobLayout | None = None


class KnownAdapters:
    """An LRU by digest. `names` are those of earlier times, which are on disk."""

    def __init__(self, names: AdapterNames) -> None:
        self._names = names
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def learn(self, version: ResolvedVersion) -> None:
        """It was resolved."""
        known = self._touched(version.digest)
        known.versions.pop(version.name, None)
        known.versions[version.name] = version

    def learn_blend(self, blend: Blend) -> None:
        """It was asked for."""
        self._touched(blend.digest).blend = blend

    def learn_layout(self, digest: str, layout: BlobLayout) -> None:
        """Its files were read."""
        self._known.setdefault(digest, _Known()).layout = layout

    def version(self, digest: str) -> ResolvedVersion | None:
        """The version of a digest that was resolved last."""
        known = self._known.get(digest)
        return next(reversed(known.versions.values()), None) if known else None

    def blend(self, digest: str) -> Blend | None:
        known = self._known.get(digest)
        return known.blend if known else None

    def layout(self, digest: str) -> BlobLayout | None:
        known = self._known.get(digest)
        return known.layout if known else None

    def names(self, digest: str) -> dict[str, int]:
        """Ranks by version name; one empty name for what was never resolved on this machine."""
        known = self._known.get(digest)
        names = {version.name: version.rank for version in known.versions.values()} if known else {}
        return names or dict(self._names.of(digest)) or {"": 0}

    def digest_of(self, reference: str) -> str | None:
        """What a canonical reference to a version or a digest meant when it was resolved."""
        namespace, adapter, number, _, digest = parse_reference(reference, "default")
        for known_digest, known in self._known.items():
            for name in known.versions:
                version = parse_version_name(name, "version")
                is_named = version.version == number or known_digest == digest
                if is_named and (version.namespace, version.adapter) == (namespace, adapter):
                    return known_digest
        return None

    def _touched(self, digest: str) -> _Known:
        known = self._known.setdefault(digest, _Known())
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known
