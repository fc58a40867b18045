"""Builds every overlay with every component, offline, and says what is wrong with any of it; and lints the Dockerfiles.

Run it as `python -m deploy.k8s.validate`.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.k8s.access import access_errors
from deploy.k8s.builds import EXCLUSIVE, FILE_NAMES, K8S, Build, BuildError, builds, kustomization
from deploy.k8s.policy import policy_errors
from deploy.k8s.schemas import schema_errors
from deploy.k8s.services import service_errors
from deploy.k8s.storage import DOCKERFILES, storage_errors
from deploy.k8s.wiring import wiring_errors

HADOLINT = Path(sys.executable).parent / "hadolint"
CHECKS = (schema_errors, policy_errors, access_errors, service_errors, storage_errors, wiring_errors)


def build_errors(build: Build) -> list[str]:
    """All that is wrong with one build."""
    try:
        manifests = build.manifests()
    except BuildError as error:
        return [str(error)]
    return [error for check in CHECKS for error in check(manifests)]


def exclusion_errors() -> Iterator[str]:
    """Pairs of components that must be refused together and are not."""
    for pair in EXCLUSIVE:
        build = Build(K8S / "overlays" / "dev", tuple(sorted(pair)))
        if not build_errors(build):
            yield f"{build}: neither kustomize nor a check refuses it"


def renaming_errors(wanted: Mapping[str, Any]) -> Iterator[str]:
    """What of a kustomization changes names or selectors: others know Services by name, and selectors are immutable."""
    forbidden = ("namePrefix", "nameSuffix", "commonLabels")
    yield from (f"has {key}" for key in forbidden if key in wanted)
    for labels in wanted.get("labels", []):
        if labels.get("includeSelectors"):
            yield "puts labels into selectors"


def lint_errors() -> list[str]:
    """What hadolint says of the Dockerfiles."""
    files = [str(path) for path in sorted(DOCKERFILES.glob("*.Dockerfile"))]
    result = subprocess.run([str(HADOLINT), "--no-color", *files], capture_output=True, text=True)
    return [] if result.returncode == 0 else [(result.stdout + result.stderr).strip()]


def main() -> int:
    """Prints what is wrong; the exit code is 1 if anything is."""
    found = {str(build): build_errors(build) for build in builds()}
    for path in sorted(path for name in FILE_NAMES for path in K8S.rglob(name)):
        if errors := list(renaming_errors(kustomization(path.parent))):
            found[str(path.relative_to(K8S))] = errors
    found |= {"exclusive components": list(exclusion_errors()), "Dockerfiles": lint_errors()}
    for name, errors in found.items():
        print(f"{name}: {'; '.join(errors) or 'valid'}", flush=True)
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
