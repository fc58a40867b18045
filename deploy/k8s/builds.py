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
        if (namespace := _kustomization(self.overlay).get("namespace")) is not None:
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
    """The base and all overlays."""
    return [K8S / "base", *sorted((K8S / "overlays").iterdir())]


def components() -> list[str]:
    """The names of all components."""
    return sorted(path.name for path in (K8S / "components").iterdir())


def builds() -> Iterator[Build]:
    """Every overlay with all components that can be together, in every largest choice of them; and alone."""
    for overlay in overlays():
        yield Build(overlay)
        present = {Path(path).name for path in _kustomization(overlay).get("components", [])}
        yield from (Build(overlay, chosen) for chosen in _largest_choices(sorted(set(components()) - present)))


def _largest_choices(names: list[str]) -> Iterator[tuple[str, ...]]:
    """The sets of names without an exclusive pair that no name can be added to."""
    valid = [
        frozenset(chosen)
        for size in range(len(names) + 1)
        for chosen in combinations(names, size)
        if not any(pair <= set(chosen) for pair in EXCLUSIVE)
    ]
    yield from (tuple(sorted(chosen)) for chosen in valid if not any(chosen < other for other in valid))


def _kustomization(folder: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((folder / "kustomization.yaml").read_text()))
