"""What the images install: every file by its hash, in the versions that are tested, all that is needed, no more."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.k8s.dockerfile import Dockerfile

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "docker"
EXTRAS = {"registry": ("tracing",), "inference": ("inference", "tracing")}
# Comes with torch on a GPU, or builds our own package; neither is in an environment made for tests.
ONLY_IN_IMAGES = re.compile(r"(nvidia|cuda)-.*|setuptools")
_PIN = re.compile(r"^([\w.-]+)(?:\[[\w,-]+\])?==([^\s;\\]+)", re.MULTILINE)


def pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(match[1]): match[2] for match in _PIN.finditer(path.read_text())}


def needed(extras: tuple[str, ...]) -> set[str]:
    """Names of all that pyproject.toml asks for, and of what these packages, as installed here, ask for in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    found: set[str] = set()
    todo = [(own, frozenset[str]())]
    while todo:
        texts, wanted = todo.pop()
        for text in texts:
            requirement = Requirement(text)
            environments = [{**default_environment(), "extra": extra} for extra in ("", *wanted)]
            if requirement.marker and not any(requirement.marker.evaluate(each) for each in environments):
                continue
            child = canonicalize_name(requirement.name)
            if child not in found and not ONLY_IN_IMAGES.fullmatch(child):
                found.add(child)
                todo.append((metadata.requires(child) or [], frozenset(requirement.extras)))
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_every_package_has_hashes_and_the_tested_version(name: str) -> None:
    text = (FOLDER / f"{name}.lock").read_text()
    entries = re.split(r"\n(?=[\w.-]+(?:\[[\w,-]+\])?==)", text)
    assert all(_PIN.match(entry) and re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)
    assert "://" not in text, "where packages come from is the builder's business"
    tested = pins(ROOT / "constraints.txt")
    locked = {p: version for p, version in pins(FOLDER / f"{name}.lock").items() if not ONLY_IN_IMAGES.fullmatch(p)}
    assert locked == {package: tested.get(package) for package in locked}


@pytest.mark.parametrize("name", EXTRAS)
def test_all_that_is_needed_and_no_more(name: str) -> None:
    locked = {package for package in pins(FOLDER / f"{name}.lock") if not ONLY_IN_IMAGES.fullmatch(package)}
    assert locked == needed(EXTRAS[name])
    assert ("torch" in locked) == (name == "inference")


@pytest.mark.parametrize("name", EXTRAS)
def test_the_image_installs_it_and_nothing_beside_it(name: str) -> None:
    (install,) = [rest for rest in Dockerfile.read(FOLDER / f"{name}.Dockerfile").all("RUN", stage=0) if "pip" in rest]
    first, second = re.findall(r"pip install ([^&]*)", install)
    assert f"--require-hashes -r {name}.lock" in first
    assert {"--no-deps", "--no-build-isolation"} <= set(second.split())
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert build == [line for line in (FOLDER / "build.in").read_text().splitlines() if not line.startswith("#")]
    (setuptools,) = (Requirement(text) for text in build)
    assert setuptools.specifier.contains(pins(FOLDER / f"{name}.lock")["setuptools"])
