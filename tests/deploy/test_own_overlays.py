"""An operator's own overlays, put into a copy of the tree as docs/operate.md says: what the validator makes of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.k8s.builds import K8S
from tests.deploy.test_documented_overlay import documented

ROOT = K8S.parents[1]
# Prints for each build of an overlay what is wrong with it; without the flag only which builds there are.
VALIDATE = """
import json, sys
from deploy.k8s.builds import builds
from deploy.k8s.validate import build_errors
wanted, checks = sys.argv[1], sys.argv[2:] == ["--check"]
found = [build for build in builds() if build.overlay.name == wanted]
print(json.dumps({" ".join(build.components): build_errors(build) if checks else [] for build in found}))
"""


@pytest.fixture
def k8s(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "deploy" / "k8s"


def put(k8s: Path, name: str, kustomization: dict[str, Any], file: str = "kustomization.yaml") -> None:
    """An overlay, with the paths that it has there."""
    (k8s / "overlays" / name).mkdir()
    text = yaml.safe_dump(kustomization).replace(f"{K8S}/overlays/", "../").replace(f"{K8S}/", "../../")
    (k8s / "overlays" / name / file).write_text(text)


def validated(k8s: Path, name: str, *flags: str) -> dict[str, list[str]]:
    """What is wrong with each build of an overlay, by the components beside it."""
    command = [sys.executable, "-c", VALIDATE, name, *flags]
    tree = k8s.parents[1]
    paths = {**os.environ, "PYTHONPATH": f"{tree}:{ROOT}"}
    return dict(json.loads(subprocess.run(command, cwd=tree, env=paths, check=True, stdout=subprocess.PIPE).stdout))


def test_the_documented_one_is_valid_alone_and_with_what_goes_with_it(k8s: Path) -> None:
    """It has `keda`, and the `postgres` of `gpu`."""
    put(k8s, "mine", documented().overlay)
    assert validated(k8s, "mine", "--check") == {"": [], "inference-pool tracing": [], "tls tracing": []}


def test_a_model_with_its_own_name(k8s: Path) -> None:
    put(k8s, "mine", documented().overlay | documented().model)
    settings = (k8s / "overlays" / "gpu" / "config" / "inference.toml").read_text()
    config = k8s / "overlays" / "mine" / "config" / "inference.toml"
    config.parent.mkdir()
    config.write_text(settings.replace('"/models/base"', '"/models/llama-3.1-8b"'))
    assert validated(k8s, "mine", "--check") == {"": [], "inference-pool tracing": [], "tls tracing": []}
    config.write_text(settings.replace("/models", "/model"))
    errors = validated(k8s, "mine", "--check")[""]
    assert any("/model/base is on no volume" in error for error in errors), errors


def test_components_of_the_overlays_below_count(k8s: Path) -> None:
    put(k8s, "below", {"resources": ["../gpu"], "components": ["../../components/tls", "../../components/monitoring"]})
    put(k8s, "mine", {"resources": ["../below"], "components": ["../../components/hpa"]}, "kustomization.yml")
    assert set(validated(k8s, "below")) == {"", "hpa tracing", "keda tracing"}
    assert set(validated(k8s, "mine")) == {"", "tracing"}


def test_an_overlay_takes_the_namespace_of_the_one_below(k8s: Path) -> None:
    put(k8s, "mine", {"resources": ["../gpu"], "components": ["../../components/tls"], "namespace": "loraplex"})
    put(k8s, "above", {"resources": ["../mine"]})
    assert validated(k8s, "above", "--check") == {"": [], "hpa monitoring tracing": [], "keda monitoring tracing": []}


def test_a_folder_that_is_no_overlay_is_an_error_and_no_crash(k8s: Path) -> None:
    (k8s / "overlays" / "mine").mkdir()
    (k8s / "overlays" / "notes.txt").write_text("")
    errors = validated(k8s, "mine", "--check")[""]
    assert len(errors) == 1
    assert "kustomization.yaml" in errors[0]


def test_what_has_both_of_a_pair_gets_nothing_beside_it(k8s: Path) -> None:
    put(k8s, "mine", {"resources": ["../gpu"], "components": ["../../components/hpa", "../../components/keda"]})
    found = validated(k8s, "mine", "--check")
    assert set(found) == {""}
    assert "replicas" in found[""][0]
