"""The install and ENTRYPOINT lines of the Dockerfiles, run as in the image: unprivileged, on a tree not to be written.

No container engine is needed: the paths of the image are replaced by folders, the user is one of a user namespace, and
the packages that pip would download are those of this environment.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.k8s.access import GIVEN
from deploy.k8s.builds import K8S, Build
from deploy.k8s.dockerfile import Dockerfile
from examples.stack import free_address
from tests.inference_service.serving_fakes import raw_config

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ROOT / "deploy" / "docker"
NAMES = ("registry", "inference")
PACKAGES = sysconfig.get_path("purelib")


@dataclass(frozen=True)
class Image:
    """`tree` is what the image's root would be, `writable` what volumes would be; `user` runs a command as in a pod."""

    dockerfile: Dockerfile
    tree: Path
    writable: Path
    user: tuple[str, ...]

    def here(self, text: str) -> str:
        """Paths of the image as they are on this machine."""
        volumes = text.replace("/var/lib/loraplex", f"{self.writable}/state")
        volumes = re.sub(r"(?<![\w/])/tmp", f"{self.writable}/tmp", volumes)
        return volumes.replace("/opt/loraplex", f"{self.tree}/opt/loraplex")

    def environment(self) -> dict[str, str]:
        given = {name: self.here(value) for name, value in self.dockerfile.environment.items()}
        return {**given, "PYTHONPATH": PACKAGES}

    def command(self, *arguments: str) -> list[str]:
        """The ENTRYPOINT with arguments."""
        python, *words = self.dockerfile.command("ENTRYPOINT")
        return [*self.user, f"{self.tree}/opt/loraplex/bin/{python}", *words, *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        state = f"{self.writable}/state"
        command = self.command(*arguments)
        return subprocess.run(command, env=self.environment(), cwd=state, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module", params=NAMES)
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The build stage, done: what COPY copies, and what the RUN line with pip installs."""
    dockerfile = Dockerfile.read(DOCKERFILES / f"{request.param}.Dockerfile")
    # pytest's own folders can be entered by nobody else.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        tree, writable, source = (Path(folder) / name for name in ("tree", "writable", "source"))
        for made in (tree / "opt", writable / "state", writable / "tmp", source):
            made.mkdir(parents=True)
        for rest in dockerfile.all("COPY", stage=0):
            *paths, target = rest.split()
            for path in paths:
                _copy(ROOT / path, source / (Path(path).name if target == "./" else target))
        built = Image(dockerfile, tree, writable, _user())
        (install,) = [rest for rest in dockerfile.all("RUN", stage=0) if "pip" in rest]
        offline = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1", "PYTHONPATH": PACKAGES}
        install = built.here(install).replace("python -m venv", f"{sys.executable} -m venv --without-pip")
        # What the lock names is in this environment, or is only for a GPU; tests/deploy/test_locks.py looks at it.
        install = re.sub(r"\S*pip install [^&]*--require-hashes[^&]*&& ", "", install)
        install = install.replace(f"{tree}/opt/loraplex/bin/pip", f"{tree}/opt/loraplex/bin/python -m pip")
        shell = [*built.user, "sh", "-ec", install]
        done = subprocess.run(shell, cwd=source, env={**os.environ, **offline}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.rmtree(source)
        for path in [tree, *tree.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        yield built
        for path in [tree, *tree.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(path, target)


def _user() -> tuple[str, ...]:
    """How to run a command without any capability, as the image's user if this machine lets us have a namespace."""
    namespace = ("unshare", "--user", "--map-user=65532", "--map-group=65532")
    if subprocess.run([*namespace, "true"], capture_output=True).returncode == 0:
        return namespace
    return () if os.geteuid() else ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")


def test_the_tree_cannot_be_written_and_the_volumes_can(image: Image) -> None:
    python = f"{image.tree}/opt/loraplex/bin/python"
    script = (
        "import os, sys; print([os.access(path, os.W_OK) for path in sys.argv[1:]]);"
        "print(*[line for line in open('/proc/self/status') if line.startswith('CapEff')])"
    )
    paths = [f"{image.tree}/opt/loraplex", f"{image.writable}/state", f"{image.writable}/tmp"]
    said = subprocess.run(
        [*image.user, python, "-c", script, *paths], capture_output=True, text=True, check=True
    ).stdout
    assert said.split("\n")[0] == "[False, True, True]"
    assert int(said.split()[-1], 16) == 0, "it has capabilities"


def test_the_program_is_the_installed_one(image: Image) -> None:
    module = image.dockerfile.command("ENTRYPOINT")[-1]
    python = f"{image.tree}/opt/loraplex/bin/python"
    script = f"import {module}, shared, loraplex; print({module}.__file__, shared.__file__, loraplex.__file__)"
    said = subprocess.run(
        [*image.user, python, "-c", script],
        env=image.environment(), cwd=image.writable / "state", capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert all(Path(path).is_relative_to(image.tree) for path in said), said


def test_wrong_flags_and_help(image: Image) -> None:
    assert "--listen" in image.run("--help").stdout
    wrong = image.run("--no-such-flag")
    assert wrong.returncode == 2
    assert "--no-such-flag" in wrong.stderr


def test_the_command_of_the_image_is_understood(image: Image) -> None:
    """CMD's flags are the service's own; only what they listen on is no address here."""
    command = [word.replace("0.0.0.0:", "256.0.0.0:") for word in image.dockerfile.command("CMD")]
    required = ["--model=/nowhere"] if "inference_service" in image.dockerfile.command("ENTRYPOINT") else []
    failed = image.run(*command, *required)
    assert failed.returncode == 2, failed.stderr
    assert "unrecognized" not in failed.stderr


def test_it_starts_serves_and_drains_as_the_manifests_say(image: Image) -> None:
    """With the pod's arguments and configuration file; the pod's probes and the monitor's scrape are answered."""
    name = image.dockerfile.command("ENTRYPOINT")[-1].removesuffix("_service")
    pod, config, path = _manifests(name)
    (image.writable / "state" / "config").mkdir()
    toml = image.writable / "state" / "config" / f"{name}.toml"
    addresses = {port: free_address() for port in re.findall(r'"0\.0\.0\.0:(\d+)"', config)}
    for port, address in addresses.items():
        config = config.replace(f"0.0.0.0:{port}", address)
    config = image.here(config)
    for mounted, folder in _secrets(image, pod).items():
        config = config.replace(mounted, str(folder))
    toml.write_text(config)
    here = {f"--config=/etc/loraplex/{name}.toml": f"--config={toml}"}
    for init in pod.get("initContainers", []):
        prepared = image.run(*[here.get(word, word) for word in init["args"]])
        assert prepared.returncode == 0, prepared.stderr
    (container,) = pod["containers"]
    ports = {port["name"]: addresses[str(port["containerPort"])] for port in container["ports"]}
    log = image.writable / "log"
    with log.open("wb") as said:
        arguments = [here.get(word, word) for word in container["args"]] + _replica_flags(image, name)
        environment, state = image.environment(), image.writable / "state"
        process = subprocess.Popen(image.command(*arguments), env=environment, cwd=state, stdout=said, stderr=said)
        try:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                grpc_probe = container[probe]["grpc"]
                assert _serves(addresses[str(grpc_probe["port"])], grpc_probe.get("service", "")), log.read_text()
            with urllib.request.urlopen(f"http://{ports['metrics']}{path}", timeout=10) as answer:
                assert b"loraplex_" in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def _manifests(name: str) -> tuple[dict[str, Any], str, str]:
    """The pod of a service, its configuration file, and the path that is scraped."""
    manifests = Build(K8S / "base", ("monitoring",)).manifests()
    found = {(item["kind"], item["metadata"]["name"]): item for item in manifests}
    pod = found["Deployment", f"loraplex-{name}"]["spec"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "config"]
    config = found["ConfigMap", volume["configMap"]["name"]]["data"][f"{name}.toml"]
    return pod, config, found["ServiceMonitor", f"loraplex-{name}"]["spec"]["endpoints"][0]["path"]


def _secrets(image: Image, pod: dict[str, Any]) -> dict[str, Path]:
    """Folders in the place of the Secrets that the pod mounts, by where it does."""
    contents = {"tokens.toml": f'[[tokens]]\nsubject = "x"\nsha256 = "{64 * "0"}"\nroles = ["replica"]\n', "token": "x"}
    found = {}
    (container,) = pod["containers"]
    for volume in (volume for volume in pod["volumes"] if "secret" in volume):
        folder = image.writable / "state" / volume["name"]
        folder.mkdir()
        for key in GIVEN[volume["secret"]["secretName"]]:
            (folder / key).write_text(contents[key])
        (path,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
        found[path] = folder
    return found


def _replica_flags(image: Image, name: str) -> list[str]:
    """What stands for the volume of models and the registry that a replica would have."""
    if name == "registry":
        return []
    model = image.writable / "state" / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(raw_config()))
    small = ["--load-format=dummy", "--device=cpu", "--adapter-memory=1MiB", "--kv-cache-memory=1MiB"]
    return [f"--model={model}", f"--registry={free_address()}", *small]


def _serves(address: str, service: str, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < until:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5, wait_for_ready=True)
            except grpc.RpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
            time.sleep(0.05)
    return False


@pytest.mark.parametrize("name", NAMES)
def test_images_are_small_and_unprivileged(name: str) -> None:
    dockerfile = Dockerfile.read(DOCKERFILES / f"{name}.Dockerfile")
    assert len(dockerfile.stages) == 2
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", dockerfile.arguments["BASE"]), "a digest is given at release"
    assert all(stage[0][1].split()[0] == "${BASE}" for stage in dockerfile.stages)
    assert dockerfile.all("USER") == ["65532:65532"]
    assert dockerfile.stages[-1][-1][0] == "CMD"
    (install,) = [rest for rest in dockerfile.all("RUN", stage=0) if "pip" in rest]
    extras = {"registry": "[tracing]", "inference": "[inference,tracing]"}
    assert f"'.{extras[name]}'" in install, "the registry's image has no torch"
    assert "-c constraints.txt" in install


def test_the_gpu_image_can_compile() -> None:
    dockerfile = Dockerfile.read(DOCKERFILES / "inference.Dockerfile")
    (packages,) = dockerfile.all("RUN")
    assert {"gcc", "libc6-dev"} <= set(packages.split())
    assert dockerfile.environment["CC"] == "gcc"
    assert "Python.h" in packages, "the build fails on a BASE without headers"


@pytest.mark.parametrize("name", NAMES)
def test_exposed_ports_are_those_of_the_base(name: str) -> None:
    text = (ROOT / "deploy" / "k8s" / "base" / "config" / f"{name}.toml").read_text()
    listening = re.findall(r'^\w*listen = "0\.0\.0\.0:(\d+)"', text, re.MULTILINE)
    dockerfile = Dockerfile.read(DOCKERFILES / f"{name}.Dockerfile")
    assert dockerfile.all("EXPOSE") == [" ".join(listening)]
