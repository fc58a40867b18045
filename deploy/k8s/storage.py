"""Whether everything that a container reads or writes lies on a volume made for it, and fits its limits."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.k8s.builds import K8S, Manifest
from deploy.k8s.dockerfile import Dockerfile
from deploy.k8s.services import Running, SettingsError, running
from inference_service.config import InferenceConfig, parse_size
from inference_service.machine_checks import kernel_cache
from registry_service.database import is_sqlite

DOCKERFILES = K8S.parent / "docker"
IMAGES = {"registry": "registry", "migrate": "registry", "inference": "inference"}
CACHE_SHARE = 0.9  # of a volume, for adapters on disk; the rest is for files half fetched, and kernels
FOLDERS = ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "TMPDIR")
CREDENTIALS = (
    *("tls_cert", "tls_key", "tls_client_ca", "registry_ca", "registry_cert", "registry_key"),
    *("auth_token_file", "auth_jwks_file", "registry_token_file"),
)


def storage_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What lies where it cannot, and what does not fit."""
    try:
        found = list(running(manifests))
    except SettingsError:
        return  # `service_errors` tells
    for each in found:
        yield from (f"{each.name}: {error}" for error in [*_path_errors(each), *_size_errors(each), *_gpu_errors(each)])
        yield from (f"{each.name}: {error}" for error in _database_errors(each))
    yield from _claim_errors(manifests)


def _claim_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Pods of one node's volume run on that node: each must be with all others, whichever comes first."""
    pods = {i["metadata"]["name"]: i for i in manifests if i["kind"] == "Deployment"}
    for claim in (i for i in manifests if i["kind"] == "PersistentVolumeClaim"):
        name = claim["metadata"]["name"]
        users = {user: pod for user, pod in pods.items() if name in _claims(pod)}
        is_alone = all(_is_one_pod(pod) for pod in users.values()) and len(users) <= 1
        if set(claim["spec"]["accessModes"]) != {"ReadWriteOnce"} or is_alone:
            continue
        labels = [pod["spec"]["template"]["metadata"]["labels"] for pod in users.values()]
        for user, pod in users.items():
            if not any(all(wanted.items() <= each.items() for each in labels) for wanted in _same_node(pod)):
                yield f"{user}: the volume {name} is one node's, and its pods may run on several"


def _claims(workload: Manifest) -> set[str]:
    volumes = workload["spec"]["template"]["spec"].get("volumes", [])
    return {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}


def _is_one_pod(workload: Manifest) -> bool:
    """At any time, rollouts included."""
    spec = workload["spec"]
    return bool(spec.get("replicas", 1) == 1 and spec.get("strategy", {}).get("type") == "Recreate")


def _same_node(workload: Manifest) -> list[Mapping[str, str]]:
    """The labels of the pods whose node this workload's must share."""
    affinity = workload["spec"]["template"]["spec"].get("affinity", {}).get("podAffinity", {})
    return [
        term["labelSelector"]["matchLabels"]
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        if term["topologyKey"] == "kubernetes.io/hostname" and "matchLabels" in term.get("labelSelector", {})
    ]


def environment(each: Running) -> Mapping[str, str]:
    """The variables of the image and those of the manifest over them."""
    image = Dockerfile.read(DOCKERFILES / f"{IMAGES[each.container['name']]}.Dockerfile")
    given = {item["name"]: item["value"] for item in each.container.get("env", []) if "value" in item}
    return {**image.environment, **given}


def _path_errors(each: Running) -> Iterator[str]:
    config, variables = each.config, environment(each)
    writable = {name: variables[name] for name in FOLDERS if name in variables}
    readable = {f"file root {name}": path for name, path in config.file_roots.items()}
    readable |= {name: getattr(config, name) for name in CREDENTIALS if getattr(config, name, "")}
    if isinstance(config, InferenceConfig):
        writable |= {"cache_dir": str(config.cache_dir), "kernel_cache_dir": str(kernel_cache(config))}
        if config.model.startswith("/"):
            readable["model"] = config.model
        if Path(variables["TRITON_CACHE_DIR"]) != kernel_cache(config):
            yield f"TRITON_CACHE_DIR is {variables['TRITON_CACHE_DIR']}, the service's own is {kernel_cache(config)}"
    elif is_sqlite(config.database):
        writable["database"] = config.database.removeprefix("sqlite:///")
    for name, path in writable.items():
        if (found := each.volume_at(path)) is None or not found[1]:
            yield f"{name}: {path} cannot be written"
    if each.container["name"] != "migrate":  # which reads nothing but the database
        for name, path in readable.items():
            if path != "system" and each.volume_at(path) is None:
                yield f"{name}: {path} is on no volume"


def _size_errors(each: Running) -> Iterator[str]:
    if not isinstance(config := each.config, InferenceConfig):
        return
    found = each.volume_at(str(config.cache_dir))
    limit = found[0].get("emptyDir", {}).get("sizeLimit") if found else None
    if limit and parse_size(config.disk_bytes) > CACHE_SHARE * parse_size(limit):
        yield f"disk_bytes {config.disk_bytes} is over {CACHE_SHARE:.0%} of {limit}: the pod would be evicted"
    requested = each.container["resources"]["requests"].get("ephemeral-storage", "0")
    if limit and parse_size(requested) < parse_size(config.disk_bytes):
        yield f"asks for {requested} of the node's disk and may fill disk_bytes, {config.disk_bytes}"
    in_memory = [v["emptyDir"]["sizeLimit"] for v in each.pod["volumes"] if v.get("emptyDir", {}).get("medium")]
    used = parse_size(config.host_memory) + sum(map(parse_size, in_memory))
    if used > parse_size(each.container["resources"]["limits"]["memory"]):
        yield "host_memory and volumes in memory are over the memory limit"


def _gpu_errors(each: Running) -> Iterator[str]:
    if not isinstance(config := each.config, InferenceConfig):
        return
    has_gpu = "nvidia.com/gpu" in each.container["resources"]["limits"]
    if (config.device == "cuda") != has_gpu:
        yield f"device is {config.device}, and {'a' if has_gpu else 'no'} GPU is asked for"
    shm = each.volume_at("/dev/shm/any")
    if has_gpu and (shm is None or shm[0].get("emptyDir", {}).get("medium") != "Memory"):
        yield "/dev/shm is no volume in memory: it would be 64 MiB"


def _database_errors(each: Running) -> Iterator[str]:
    if isinstance(each.config, InferenceConfig) or not is_sqlite(each.config.database):
        return
    spec = each.workload["spec"]
    if spec.get("replicas", 1) != 1 or spec.get("strategy", {}).get("type") != "Recreate":
        yield "several registries cannot share an embedded database, not even during a rollout"
