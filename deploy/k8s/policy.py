"""The rules of security and operation that all manifests keep, whatever service they are of."""

from collections.abc import Iterator, Sequence
from typing import Any

from deploy.k8s.builds import Manifest

PART_OF = "app.kubernetes.io/part-of"
# Who may have a token of the API server, with a Role of its own that only reads.
TOKEN_HOLDERS = {"loraplex-endpoint-picker"}
READING = {"get", "list", "watch"}
VOLUMES = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected"}  # of pod security `restricted`


def policy_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Breaches of the rules in one build."""
    yield from _whole_errors(manifests)
    for item in manifests:
        name = f"{item['kind']} {item['metadata']['name']}"
        match item["kind"]:
            case "StatefulSet" | "DaemonSet" | "Job" | "CronJob" | "Pod":
                yield f"{name}: no check knows this kind of workload"
            case "Deployment":
                yield from (f"{name}: {error}" for error in workload_errors(item))
            case "ServiceAccount":
                if item.get("automountServiceAccountToken") is not False:
                    yield f"{name}: pods get a token unless they say no"
            case "Role":
                if any(set(rule["verbs"]) - READING or "*" in rule["resources"] for rule in item["rules"]):
                    yield f"{name}: may more than read what it names"
            case "Namespace":
                if item["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
                    yield f"{name}: does not enforce restricted pod security"
            case "Service" if item["spec"].get("type", "ClusterIP") != "ClusterIP":
                yield f"{name}: is open to outside the cluster"
            case "Secret":
                yield f"{name}: secrets do not belong in manifests"
            case "ClusterRole" | "ClusterRoleBinding":
                yield f"{name}: reaches beyond its namespace"


def _whole_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What no single manifest shows."""
    policies = [item["spec"] for item in manifests if item["kind"] == "NetworkPolicy"]
    budgets = {str(item["spec"]["selector"]) for item in manifests if item["kind"] == "PodDisruptionBudget"}
    closed = any(
        policy["podSelector"] == {"matchLabels": {PART_OF: "loraplex"}}
        and set(policy["policyTypes"]) == {"Ingress", "Egress"}
        and "ingress" not in policy
        and "egress" not in policy
        for policy in policies
    )
    if not closed:
        yield "no NetworkPolicy denies everything by default"
    namespaces = {item["metadata"].get("namespace") for item in manifests if item["kind"] != "Namespace"}
    if len(namespaces) > 1:  # a policy, certificate or scrape that is elsewhere does nothing
        yield f"lies in several namespaces: {', '.join(sorted(map(str, namespaces)))}"
    for item in manifests:
        if item["kind"] != "Deployment":
            continue
        name, template = item["metadata"]["name"], item["spec"]["template"]
        if template["metadata"]["labels"].get(PART_OF) != "loraplex":
            yield f"{name}: the default NetworkPolicy does not see its pods"
        if name in TOKEN_HOLDERS:
            continue
        if str(item["spec"]["selector"]) not in budgets:
            yield f"{name}: no PodDisruptionBudget"
        spread = template["spec"].get("topologySpreadConstraints", [])
        if any(each["labelSelector"] != item["spec"]["selector"] for each in spread) or not spread:
            yield f"{name}: its pods are not spread"


def workload_errors(workload: Manifest) -> Iterator[str]:
    """Breaches in one workload's pods."""
    pod = workload["spec"]["template"]["spec"]
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield "pod may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "pod has no seccomp profile"
    has_token = pod.get("automountServiceAccountToken") is not False
    if has_token and workload["metadata"]["name"] not in TOKEN_HOLDERS:
        yield "pod mounts a service account token"
    if pod.get("enableServiceLinks") is not False:
        yield "pod has a variable for every Service"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield f"pod has {key}"
    for volume in pod.get("volumes", []):
        yield from (f"volume {volume['name']}: {error}" for error in volume_errors(volume))
    containers = pod.get("initContainers", []) + pod["containers"]
    for container in containers:
        yield from (f"container {container['name']}: {error}" for error in container_errors(container))
    mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
    yield from (f"volume {v['name']}: is not mounted" for v in pod.get("volumes", []) if v["name"] not in mounted)


def volume_errors(volume: dict[str, Any]) -> Iterator[str]:
    """Breaches in one volume."""
    if not VOLUMES & volume.keys():
        yield "is of a kind that restricted pods may not have"
    if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
        yield "has no size limit"


def container_errors(container: dict[str, Any]) -> Iterator[str]:
    """Breaches of the restricted pod security standard, and more, in one container."""
    security = container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem") is not True:
        yield "root file system is writable"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "may escalate privileges"
    if security.get("capabilities", {}) != {"drop": ["ALL"]}:
        yield "keeps capabilities"
    if security.get("privileged") or security.get("runAsUser") == 0:
        yield "is privileged"
    if ":" not in container["image"] or container["image"].endswith(":latest"):
        yield f"image {container['image']} is not pinned"
    resources = container.get("resources", {})
    wanted = {"cpu", "memory", "ephemeral-storage"}  # without the last, a full disk evicts it first
    if not resources.get("requests", {}).keys() >= wanted or not resources.get("limits", {}).get("memory"):
        yield "has no resource requests or no memory limit"
