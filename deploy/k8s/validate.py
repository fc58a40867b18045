"""Builds every overlay offline and checks it: against the Kubernetes schemas, and against the rules below.

Rules: containers run as non-root on a read-only root without capabilities; pods mount no token; every container has
native gRPC probes on its own port; every port, probe service and config file agrees with the services.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from inference_service.config import InferenceConfig
from registry_service.config import RegistryConfig
from shared.config import ConfigError, load

K8S = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SERVICES = {
    "registry": (50051, "loraplex.registry.v1.AdapterRegistryService"),
    "inference": (50052, "loraplex.inference.v1.InferenceService"),
}
# The second of each: settings that name folders of the cluster, which this machine has not got.
CONFIGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "registry": (RegistryConfig, {"file_roots": ["any=."]}),
    "inference": (InferenceConfig, {"file_roots": ["any=."], "model": "."}),
}


def build(overlay: Path) -> str:
    """The overlay's manifests as kustomize renders them."""
    command = [str(BIN / "kubectl"), "kustomize", str(overlay)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def schema_errors(manifests: str) -> list[str]:
    """What kubernetes-validate finds wrong."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(manifests)
        file.flush()
        command = [str(BIN / "kubernetes-validate"), "--strict", "--quiet", file.name]
        result = subprocess.run(command, capture_output=True, text=True)
    return [] if result.returncode == 0 else [result.stdout + result.stderr]


def pod_errors(workload: dict[str, Any]) -> Iterator[str]:
    """Breaches of the rules in one workload's pods."""
    pod = workload["spec"]["template"]["spec"]
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot"):
        yield "pod may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "pod has no seccomp profile"
    if pod.get("automountServiceAccountToken") is not False:
        yield "pod mounts a service account token"
    for container in pod.get("initContainers", []) + pod["containers"]:
        yield from (f"container {container['name']}: {error}" for error in security_errors(container))
    for container in pod["containers"]:
        yield from (f"container {container['name']}: {error}" for error in probe_errors(container))


def security_errors(container: dict[str, Any]) -> Iterator[str]:
    """Breaches of the restricted pod security standard, and more, in one container."""
    security = container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem") is not True:
        yield "root file system is writable"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "may escalate privileges"
    if security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"
    if not container.get("resources", {}).get("requests") or not container["resources"].get("limits", {}).get("memory"):
        yield "has no resource requests or no memory limit"


def probe_errors(container: dict[str, Any]) -> Iterator[str]:
    """Ports and probes that disagree with the service in the container."""
    port, service = SERVICES[container["name"]]
    if [p["containerPort"] for p in container["ports"]] != [port]:
        yield f"does not expose {port}"
    wanted = {"startupProbe": service, "readinessProbe": service, "livenessProbe": None}
    for probe, name in wanted.items():
        grpc = container.get(probe, {}).get("grpc", {})
        if grpc.get("port") != port or grpc.get("service") != name:
            yield f"{probe} is not a gRPC probe of {name or 'liveness'} on port {port}"


def config_errors(config_map: dict[str, Any]) -> Iterator[str]:
    """Wrong keys and values in the services' configuration files."""
    for name, text in config_map["data"].items():
        service = name.removesuffix(".toml")
        cls, elsewhere = CONFIGS[service]
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            try:
                config = load(cls, toml=Path(file.name), env={}, prefix="", flags=elsewhere)
            except ConfigError as error:
                yield str(error)
                continue
        if not config.listen.endswith(f":{SERVICES[service][0]}"):
            yield f"{name}: listen is not on port {SERVICES[service][0]}"


def overlay_errors(overlay: Path) -> list[str]:
    """All that is wrong with one overlay."""
    manifests = build(overlay)
    errors = schema_errors(manifests)
    for item in yaml.safe_load_all(manifests):
        if item["kind"] in ("Deployment", "StatefulSet"):
            errors += [f"{item['kind']} {item['metadata']['name']}: {error}" for error in pod_errors(item)]
        elif item["kind"] == "ConfigMap":
            errors += config_errors(item)
    return errors


def main() -> int:
    """Prints what is wrong; the exit code is 1 if anything is."""
    failed = False
    for overlay in [K8S / "base", *sorted((K8S / "overlays").iterdir())]:
        errors = overlay_errors(overlay)
        failed |= bool(errors)
        print(f"{overlay.relative_to(K8S)}: {'; '.join(errors) or 'valid'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
