"""Whether the manifests agree with the services that they run: flags, variables, settings, ports, probes and drains.

Each container's settings are read as the service itself reads them, so a flag or key that is renamed is an error here.
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.k8s.builds import Manifest
from inference_service.config import ENV_PREFIX as INFERENCE_PREFIX
from inference_service.config import InferenceConfig
from inference_service.launch import BaseModel, child_specs
from inference_service.server import SERVICE_NAMES
from registry_service.__main__ import ON_DATABASE
from registry_service.config import ENV_PREFIX as REGISTRY_PREFIX
from registry_service.config import RegistryConfig
from registry_service.server import SERVICE
from shared.config import ConfigError, load
from shared.errors import InvalidArgument
from shared.flags import flag_parser

CLOSING_SECONDS = 10.0  # a registry's after its drain: what the services need to be closed
SPARE_SECONDS = 5.0  # a replica's beside the graces of its processes, for all else
# Names of container ports, by the setting that says what listens there.
PORTS = {"listen": "grpc", "metrics_listen": "metrics", "health_listen": "health"}
# What stands for the value of a variable that comes from a Secret.
SECRETS = {f"{REGISTRY_PREFIX}DATABASE": "postgresql://user@host/database"}


@dataclass(frozen=True)
class Program:
    """What runs in containers of one name: its settings, and the gRPC service whose health is its readiness."""

    settings: type[Any]
    prefix: str
    service: str
    commands: tuple[str, ...] = ()


REGISTRY = Program(RegistryConfig, REGISTRY_PREFIX, SERVICE, ("serve", *ON_DATABASE))
PROGRAMS = {
    "registry": REGISTRY,
    "migrate": REGISTRY,
    "inference": Program(InferenceConfig, INFERENCE_PREFIX, SERVICE_NAMES[0]),
}


class SettingsError(Exception):
    """The service would not start with what the manifests give it."""


@dataclass(frozen=True)
class Running:
    """A container of a program, with the settings that it would run with."""

    workload: Manifest
    container: dict[str, Any]
    program: Program
    config: Any

    @property
    def pod(self) -> dict[str, Any]:
        return dict(self.workload["spec"]["template"]["spec"])

    @property
    def name(self) -> str:
        return f"{self.workload['metadata']['name']}/{self.container['name']}"

    def volume_at(self, path: str) -> tuple[dict[str, Any], bool] | None:
        """The volume that `path` lies on, and whether it can be written; None: on the image."""
        mounts = [m for m in self.container.get("volumeMounts", []) if _is_below(path, m["mountPath"])]
        if not mounts:
            return None
        mount = max(mounts, key=lambda m: len(m["mountPath"]))
        volume = next(v for v in self.pod["volumes"] if v["name"] == mount["name"])
        is_readable_only = "configMap" in volume or "secret" in volume or mount.get("readOnly", False)
        return volume, not is_readable_only


def running(manifests: Sequence[Manifest]) -> Iterator[Running]:
    """Every container of a program, init containers included.

    Raises:
        SettingsError: flags, variables or a configuration file that the program refuses.
    """
    maps = {item["metadata"]["name"]: item["data"] for item in manifests if item["kind"] == "ConfigMap"}
    for item in manifests:
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            for container in pod.get("initContainers", []) + pod["containers"]:
                if (program := PROGRAMS.get(container["name"])) is not None:
                    unread = Running(item, container, program, None)
                    yield Running(item, container, program, _settings(unread, maps))


def service_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Disagreements between the manifests and the services."""
    try:
        found = list(running(manifests))
    except SettingsError as error:
        yield str(error)
        return
    for each in found:
        is_init = each.container["name"] == "migrate"
        errors = [] if is_init else [*_port_errors(each), *_probe_errors(each), *_drain_errors(each)]
        yield from (f"{each.name}: {error}" for error in errors)


def port_of(address: str) -> int:
    """The port of HOST:PORT."""
    return int(address.rpartition(":")[2])


def addresses(config: Any) -> dict[str, str]:
    """What listens where other machines may connect to, by the name of the container's port."""
    given = {port: getattr(config, setting, "") for setting, port in PORTS.items()}
    return {port: address for port, address in given.items() if address and not address.startswith("127.")}


def _settings(container: Running, maps: Mapping[str, Mapping[str, str]]) -> Any:
    program, env = container.program, _variables(container)
    flags = _flags(container)
    path = flags.pop("config")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        if path is not None:
            file.write(_mounted_text(container, PurePosixPath(path), maps))
            file.flush()
        try:
            return load(program.settings, toml=Path(file.name), env=env, prefix=program.prefix, flags=flags)
        except ConfigError as error:
            raise SettingsError(f"{container.name}: {error}") from None


def _flags(container: Running) -> dict[str, Any]:
    args, commands = list(container.container.get("args", [])), container.program.commands
    if commands and args and not args[0].startswith("-"):
        if args[0] not in commands:
            raise SettingsError(f"{container.name}: no command {args[0]}")
        del args[0]
    parser = flag_parser(container.program.settings, container.name, "")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return vars(parser.parse_args(args))
    except (SystemExit, argparse.ArgumentError):
        raise SettingsError(said.getvalue().strip().splitlines()[-1]) from None


def _variables(container: Running) -> dict[str, str]:
    variables = {}
    for item in container.container.get("env", []):
        name = item["name"]
        if name.startswith("LORAPLEX_") and not name.startswith(container.program.prefix):
            raise SettingsError(f"{container.name}: {name} is a variable of another service")
        if "value" in item:
            variables[name] = item["value"]
        elif name in SECRETS:
            variables[name] = SECRETS[name]
    return variables


def _mounted_text(container: Running, path: PurePosixPath, maps: Mapping[str, Mapping[str, str]]) -> str:
    found = container.volume_at(str(path))
    if found is None or "configMap" not in found[0]:
        raise SettingsError(f"{container.name}: {path} is not in a mounted ConfigMap")
    data = maps.get(found[0]["configMap"]["name"], {})
    if path.name not in data:
        raise SettingsError(f"{container.name}: ConfigMap {found[0]['configMap']['name']} has no {path.name}")
    return data[path.name]


def _port_errors(each: Running) -> Iterator[str]:
    exposed = {port["name"]: port["containerPort"] for port in each.container["ports"]}
    listening = {name: port_of(address) for name, address in addresses(each.config).items()}
    if exposed != listening:
        yield f"exposes {exposed}, and listens on {listening}"
    for name, address in addresses(each.config).items():
        if not address.startswith(("0.0.0.0:", "[::]:")):
            yield f"{name}: {address} is not open to other pods"


def _probe_errors(each: Running) -> Iterator[str]:
    """Liveness asks for "", which is SERVING until the process ends, so that it follows neither registry nor engine."""
    config = each.config
    if config.tls_cert and not config.health_listen:
        yield "has TLS, which probes do not speak, and no health_listen"
        return
    port = port_of(config.health_listen or config.listen)
    wanted = {"startupProbe": each.program.service, "readinessProbe": each.program.service, "livenessProbe": None}
    for probe, service in wanted.items():
        grpc = each.container.get(probe, {}).get("grpc", {})
        if grpc.get("port") != port or grpc.get("service") != service:
            yield f"{probe} is not a gRPC probe of {service or 'liveness'} on port {port}"


def _drain_errors(each: Running) -> Iterator[str]:
    pause = each.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if not pause:
        yield "does not pause before it stops: clients would still be sent to it"
    try:
        grace, needed = each.pod.get("terminationGracePeriodSeconds", 30), pause + _ending_seconds(each.config)
    except InvalidArgument as error:
        yield error.summary
        return
    if grace < needed:
        yield f"is killed after {grace} s and needs {needed:.0f}: preStop, drain_grace, and time to end processes"


def _ending_seconds(config: Any) -> float:
    """From SIGTERM to the end at the latest. A replica's processes end stage by stage, each killed after its grace.

    Raises:
        InvalidArgument: the engine refuses its settings.
    """
    if not isinstance(config, InferenceConfig):
        return float(config.drain_grace + CLOSING_SECONDS)
    nowhere = BaseModel(Path(config.model), "any", "", "cpu", "float32")
    graces: dict[int, float] = {}
    for spec in child_specs(config, nowhere, Path("/run"), 0):
        graces[spec.stage] = max(spec.grace, graces.get(spec.stage, 0.0))
    return sum(graces.values()) + SPARE_SECONDS


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
