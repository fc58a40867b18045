"""What is built from the manifests: every overlay, alone and with every component that goes with it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import yaml

K8S = Path(__file__).resolve().parent
FILE_NAMES = ("kustomization.yaml", "kustomization.yml", "Kustomization")  # as kustomize looks for them
KUBECTL = Path(sys.executable).parent / "kubectl"
# Each pair is for an operator to choose from.
EXCLUSIVE = (frozenset({"hpa", "keda"}), frozenset({"inference-pool", "tls"}))

Manifest = dict[str, Any]


class BuildError(Exception):
    """kustomize refused; what it said."""


class Build(NamedTuple):
    """One folder of `overlays`, or `base`, with components beside it."""

    overlay: Path
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join([str(self.overlay.relative_to(K8S)), *self.components])

    def manifests(self) -> list[Manifest]:
        """As kustomize renders them. Raises BuildError."""
        wanted: dict[str, Any] = {
            "resources": [str(self.overlay)],
            "components": [str(K8S / "components" / name) for name in self.components],
        }
        if (namespace := _namespace(self.overlay)) is not None:
            wanted["namespace"] = namespace  # the overlay's own reaches nothing that is added above it
        return rendered(wanted)


def rendered(kustomization: Mapping[str, Any]) -> list[Manifest]:
    """What kustomize makes of it, with `resources` and `components` given as whole paths. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="loraplex-build-") as created:
        folder = Path(created).resolve()
        # kustomize takes no whole paths, but those that go up out of the folder.
        paths = {
            key: [os.path.relpath(path, folder) for path in kustomization.get(key, [])]
            for key in ("resources", "components")
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump({**kustomization, **paths}))
        result = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True)
    if result.returncode:
        raise BuildError(result.stderr.strip())
    return list(yaml.safe_load_all(result.stdout))


def overlays() -> list[Path]:
    """The base and all overlays, an operator's own beside ours."""
    return [K8S / "base", *sorted(path for path in (K8S / "overlays").iterdir() if path.is_dir())]


def components() -> list[str]:
    """The names of all components."""
    return sorted(path.name for path in (K8S / "components").iterdir() if path.is_dir())


def builds() -> Iterator[Build]:
    """Every overlay alone, and with all components that can be beside its own, in every largest choice of them."""
    for overlay in overlays():
        yield Build(overlay)
        yield from (Build(overlay, chosen) for chosen in _largest_choices(_present(overlay)) if chosen)


def kustomization(folder: Path) -> dict[str, Any]:
    """What the folder's kustomization says; nothing where it has none, which kustomize itself refuses."""
    files = [folder / name for name in FILE_NAMES if (folder / name).is_file()]
    return dict(yaml.safe_load(files[0].read_text()) or {}) if files else {}


def _largest_choices(present: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """The sets of components without an exclusive pair, those of `present` counted, that no name can be added to."""
    names = sorted(set(components()) - present)
    valid = [
        frozenset(chosen)
        for size in range(len(names) + 1)
        for chosen in combinations(names, size)
        if not any(pair <= present.union(chosen) for pair in EXCLUSIVE)
    ]
    yield from (tuple(sorted(chosen)) for chosen in valid if not any(chosen < other for other in valid))


def _present(folder: Path) -> frozenset[str]:
    """The names of the components that a folder brings: its own, and those of the folders that it is made of."""
    below = frozenset().union(*map(_present, _folders(folder, "resources", "components")))
    return below.union(path.name for path in _folders(folder, "components"))


def _namespace(folder: Path) -> str | None:
    """Where it puts its objects: as it says itself, or else as an overlay does that it is made of."""
    if (own := kustomization(folder).get("namespace")) is not None:
        return str(own)
    return next(filter(None, map(_namespace, _folders(folder, "resources"))), None)


def _folders(folder: Path, *keys: str) -> list[Path]:
    """The folders that these lists of a kustomization name; files and addresses are left out."""
    paths = [folder / path for key in keys for path in kustomization(folder).get(key) or []]
    return [path.resolve() for path in paths if path.is_dir()]
