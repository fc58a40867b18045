"""Every build is valid, and each check refuses what it is there to refuse: the dev overlay with one thing spoiled."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml

from deploy.k8s.access import access_errors
from deploy.k8s.builds import EXCLUSIVE, K8S, Build, BuildError, builds, components
from deploy.k8s.policy import policy_errors
from deploy.k8s.schemas import schema_errors
from deploy.k8s.services import running, service_errors
from deploy.k8s.storage import storage_errors
from deploy.k8s.validate import CHECKS, lint_errors, renaming_errors
from deploy.k8s.wiring import wiring_errors

Spoil = Callable[[dict[tuple[str, str], dict[str, Any]]], None]
GPU = K8S / "overlays" / "gpu"
TOKENS = "/etc/loraplex-tokens/tokens.toml"
REGISTRY, INFERENCE = ("Deployment", "loraplex-registry"), ("Deployment", "loraplex-inference")


@cache
def built(*chosen: str) -> list[dict[str, Any]]:
    return Build(GPU, chosen).manifests()


def spoiled(chosen: tuple[str, ...], spoil: Spoil) -> list[dict[str, Any]]:
    """The gpu overlay with components, after `spoil` has changed it. Names are without the hash of the data."""
    manifests = copy.deepcopy(built(*chosen))
    spoil({(item["kind"], _plain(item)): item for item in manifests})
    return manifests


def _plain(item: dict[str, Any]) -> str:
    name = item["metadata"]["name"]
    return name.rpartition("-")[0] if item["kind"] == "ConfigMap" and len(name.rpartition("-")[2]) == 10 else name


def pod(items, workload=INFERENCE):
    return items[workload]["spec"]["template"]["spec"]


def container(items, workload=INFERENCE):
    return pod(items, workload)["containers"][0]


def variable(items, name, workload=INFERENCE):
    return next(item for item in container(items, workload)["env"] if item["name"] == name)


def spec(items, kind, name="loraplex-inference"):
    return items[kind, name]["spec"]


def labels(items):
    return items[INFERENCE]["spec"]["template"]["metadata"]["labels"]


def config(items, service, old, new):
    data = items["ConfigMap", f"loraplex-{service}"]["data"]
    assert old in data[f"{service}.toml"]
    data[f"{service}.toml"] = data[f"{service}.toml"].replace(old, new)


def volume(items, name):
    return next(v for v in pod(items)["volumes"] if v["name"] == name)


def test_every_component_is_in_a_build_with_every_overlay() -> None:
    seen: dict[str, set[str]] = {}
    for build in builds():
        seen.setdefault(build.overlay.name, set()).update(build.components)
    assert set(seen) == {"base", "dev", "gpu"}
    assert seen["dev"] == set(components())
    assert seen["gpu"] == set(components()) - {"postgres"}  # which it has by itself


@pytest.mark.parametrize(
    "chosen", [(), ("hpa", "inference-pool", "monitoring", "tracing"), ("keda", "monitoring", "tls")]
)
def test_the_builds_are_valid(chosen: tuple[str, ...]) -> None:
    assert [error for check in CHECKS for error in check(built(*chosen))] == []


def test_autoscalers_cannot_be_built_together() -> None:
    assert frozenset({"hpa", "keda"}) in EXCLUSIVE
    with pytest.raises(BuildError, match="replicas"):
        Build(GPU, ("hpa", "keda")).manifests()


def test_a_pool_of_replicas_with_tls_is_refused() -> None:
    errors = list(wiring_errors(built("inference-pool", "tls")))
    assert any("speak HTTP/2 in the clear" in error for error in errors)


@pytest.mark.parametrize(
    "kustomization", [{"namePrefix": "x-"}, {"commonLabels": {}}, {"labels": [{"pairs": {}, "includeSelectors": True}]}]
)
def test_names_and_selectors_stay(kustomization: dict[str, Any]) -> None:
    assert len(list(renaming_errors(kustomization))) == 1
    ours = [yaml.safe_load(path.read_text()) for path in K8S.rglob("kustomization.yaml")]
    assert [error for each in ours for error in renaming_errors(each)] == []


def test_the_dockerfiles_are_clean() -> None:
    assert lint_errors() == []


POLICY: dict[str, tuple[str, Spoil]] = {
    "root": ("may run as root", lambda i: pod(i)["securityContext"].pop("runAsNonRoot")),
    "seccomp": ("no seccomp", lambda i: pod(i)["securityContext"].pop("seccompProfile")),
    "token": ("mounts a service account token", lambda i: pod(i).pop("automountServiceAccountToken")),
    "account": ("get a token", lambda i: i["ServiceAccount", "loraplex-registry"].pop("automountServiceAccountToken")),
    "links": ("variable for every Service", lambda i: pod(i).pop("enableServiceLinks")),
    "host": ("hostNetwork", lambda i: pod(i).update(hostNetwork=True)),
    "host-path": ("may not have", lambda i: pod(i)["volumes"].append({"name": "x", "hostPath": {"path": "/"}})),
    "unmounted": ("not mounted", lambda i: pod(i)["volumes"].append({"name": "x", "emptyDir": {"sizeLimit": "1Gi"}})),
    "limit": ("no size limit", lambda i: volume(i, "tmp")["emptyDir"].pop("sizeLimit")),
    "root-fs": ("is writable", lambda i: container(i)["securityContext"].update(readOnlyRootFilesystem=False)),
    "escalation": ("escalate", lambda i: container(i)["securityContext"].pop("allowPrivilegeEscalation")),
    "capabilities": (
        "capabilities",
        lambda i: container(i)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
    "init": ("migrate: root file", lambda i: pod(i, REGISTRY)["initContainers"][0]["securityContext"].clear()),
    "image": ("not pinned", lambda i: container(i).update(image="loraplex-inference:latest")),
    "requests": ("no resource requests", lambda i: container(i)["resources"].pop("requests")),
    "no disk": (
        "no resource requests",
        lambda i: container(i, REGISTRY)["resources"]["requests"].pop("ephemeral-storage"),
    ),
    "elsewhere": (
        "several namespaces: None, loraplex",
        lambda i: i["ServiceMonitor", "loraplex-inference"]["metadata"].pop("namespace"),
    ),
    "deny": ("denies everything", lambda i: spec(i, "NetworkPolicy", "loraplex-deny").update(policyTypes=["Ingress"])),
    "unseen": ("does not see", lambda i: labels(i).pop("app.kubernetes.io/part-of")),
    "budget": (
        "no PodDisruptionBudget",
        lambda i: spec(i, "PodDisruptionBudget", "loraplex-registry").update(selector={}),
    ),
    "spread": ("not spread", lambda i: pod(i, REGISTRY).pop("topologySpreadConstraints")),
    "others spread": (
        "not spread",
        lambda i: pod(i)["topologySpreadConstraints"][0].update(labelSelector={"matchLabels": {"a": "b"}}),
    ),
    "role": ("more than read", lambda i: i["Role", "loraplex-endpoint-picker"]["rules"][0]["verbs"].append("create")),
    "namespace": ("restricted", lambda i: i["Namespace", "loraplex"]["metadata"].pop("labels")),
    "open": ("outside the cluster", lambda i: spec(i, "Service").update(type="LoadBalancer")),
    "other": ("no check knows", lambda i: i[REGISTRY].update(kind="Job")),
}

SCHEMAS: dict[str, tuple[str, Spoil]] = {
    "core": ("replicass", lambda i: i[REGISTRY]["spec"].update(replicass=2)),
    "core-deep": ("imagePullPolice", lambda i: container(i).update(imagePullPolice="Always")),
    "core-type": (
        "maxUnavailable",
        lambda i: spec(i, "PodDisruptionBudget", "loraplex-registry").update(maxUnavailable=[]),
    ),
    "custom": ("endpoint", lambda i: spec(i, "ServiceMonitor").update(endpoint=[])),
    "rule": ("exp", lambda i: spec(i, "PrometheusRule", "loraplex")["groups"][0]["rules"][0].update(exp="up")),
    "duration": (
        "five minutes",
        lambda i: spec(i, "PrometheusRule", "loraplex")["groups"][0]["rules"][0].update({"for": "five minutes"}),
    ),
    "pool": ("port", lambda i: spec(i, "InferencePool")["endpointPickerRef"].pop("port")),
    "version": (
        "no schema of",
        lambda i: i["InferencePool", "loraplex-inference"].update(apiVersion="inference.networking.k8s.io/v1alpha2"),
    ),
    "unknown": ("no schema of", lambda i: i["ServiceMonitor", "loraplex-inference"].update(kind="ProbeMonitor")),
    "unknown-core": ("Deploymint", lambda i: i[REGISTRY].update(kind="Deploymint")),
}

SERVICES: dict[str, tuple[str, Spoil]] = {
    "key": ("cache_folder", lambda i: config(i, "inference", "cache_dir", "cache_folder")),
    "value": ("drain_grace", lambda i: config(i, "registry", "20.0", '"soon"')),
    "flag": ("--cnfig", lambda i: container(i).update(args=["--cnfig=/etc/loraplex/inference.toml"])),
    "command": (
        "no command server",
        lambda i: container(i, REGISTRY).update(args=["server", "--config=/etc/loraplex/registry.toml"]),
    ),
    "file": ("has no other.toml", lambda i: container(i).update(args=["--config=/etc/loraplex/other.toml"])),
    "folder": ("not in a mounted ConfigMap", lambda i: container(i).update(args=["--config=/etc/inference.toml"])),
    "variable": ("NO_SUCH", lambda i: container(i)["env"].append({"name": "LORAPLEX_INFERENCE_NO_SUCH", "value": "1"})),
    "other's variable": (
        "another service",
        lambda i: container(i)["env"].append({"name": "LORAPLEX_REGISTRY_LISTEN", "value": "x"}),
    ),
    "port": ("listens on", lambda i: container(i)["ports"][0].update(containerPort=1)),
    "metrics": ("listens on", lambda i: config(i, "inference", "50054", "50055")),
    "loopback": ("listens on", lambda i: config(i, "inference", "0.0.0.0:50054", "127.0.0.1:50054")),
    "address": ("not open to other pods", lambda i: config(i, "inference", "0.0.0.0:50052", "10.1.2.3:50052")),
    "readiness": ("readinessProbe", lambda i: container(i)["readinessProbe"]["grpc"].update(service="inference")),
    "liveness": (
        "livenessProbe",
        lambda i: container(i)["livenessProbe"]["grpc"].update(service="loraplex.inference.v1.InferenceService"),
    ),
    "startup": ("startupProbe", lambda i: container(i, REGISTRY).pop("startupProbe")),
    "grace": (
        "is killed after 159 s and needs 160",  # 5 before SIGTERM, the drain's 120, 10 a stage, 5 for all else
        lambda i: pod(i).update(terminationGracePeriodSeconds=159),
    ),
    "longer drain": (
        "is killed after 160 s and needs 340",
        lambda i: config(i, "inference", "drain_grace = 120.0", "drain_grace = 300.0"),
    ),
    "registry's grace": (
        "is killed after 34 s and needs 35",
        lambda i: pod(i, REGISTRY).update(terminationGracePeriodSeconds=34),
    ),
    "engine": (
        "max_batched_tokens",
        lambda i: config(i, "inference", "api_processes", "max_batched_tokens = 0\napi_processes"),
    ),
    "pause": ("does not pause", lambda i: container(i, REGISTRY).pop("lifecycle")),
}

STORAGE: dict[str, tuple[str, Spoil]] = {
    "cache": (
        "cache_dir: /models/cache cannot be written",
        lambda i: config(i, "inference", "/var/lib/loraplex/cache", "/models/cache"),
    ),
    "home": ("HOME: /root cannot be written", lambda i: variable(i, "HOME").update(value="/root")),
    "kernels": ("TRITON_CACHE_DIR is", lambda i: variable(i, "TRITON_CACHE_DIR").update(value="/tmp/triton")),
    "model": ("is on no volume", lambda i: config(i, "inference", '"/models/base"', '"/srv/base"')),
    "disk": ("of 150Gi", lambda i: config(i, "inference", "100GiB", "140GiB")),
    "node's disk": (
        "asks for 1Gi",
        lambda i: container(i)["resources"]["requests"].update({"ephemeral-storage": "1Gi"}),
    ),
    "memory": ("over the memory limit", lambda i: config(i, "inference", "16GiB", "60GiB")),
    "gpu": ("no GPU", lambda i: container(i)["resources"]["limits"].pop("nvidia.com/gpu")),
    "cpu": ("a GPU", lambda i: config(i, "inference", '"cuda"', '"cpu"')),
    "shm": ("/dev/shm", lambda i: volume(i, "shm")["emptyDir"].pop("medium")),
    "sqlite": ("embedded database", lambda i: container(i, REGISTRY).pop("env")),
    "replica's token": (
        "registry_token_file: /run/token is on no volume",
        lambda i: config(i, "inference", "/etc/loraplex-replica-token/token", "/run/token"),
    ),
    "one node's volume": (
        "loraplex-inference: the volume loraplex-models is one node's",
        lambda i: spec(i, "PersistentVolumeClaim", "loraplex-models").update(accessModes=["ReadWriteOnce"]),
    ),
}

WIRING: dict[str, tuple[str, Spoil]] = {
    "traces": (
        "lets out to port 4317",
        lambda i: spec(i, "NetworkPolicy", "loraplex-traces")["egress"][0]["ports"][0].update(port=4318),
    ),
    "registry-scrape": (
        "port metrics is scraped through []",
        lambda i: spec(i, "Service", "loraplex-registry-replicas")["ports"].pop(),
    ),
    "selector": ("selects []", lambda i: spec(i, "Service").update(selector={"a": "b"})),
    "target": ("leads to", lambda i: spec(i, "Service", "loraplex-registry")["ports"][0].update(targetPort="grcp")),
    "protocol": (
        "appProtocol",
        lambda i: spec(i, "Service", "loraplex-registry")["ports"][0].update(appProtocol="http"),
    ),
    "policy": (
        "selects no pods",
        lambda i: spec(i, "NetworkPolicy", "loraplex-inference-metrics").update(
            podSelector={"matchLabels": {"a": "b"}}
        ),
    ),
    "policy-port": (
        "not one of",
        lambda i: spec(i, "NetworkPolicy", "loraplex-inference-metrics")["ingress"][0]["ports"][0].update(port=9),
    ),
    "egress-port": ("not one of", lambda i: spec(i, "NetworkPolicy")["egress"][0]["ports"][0].update(port=9)),
    "anybody": ("anybody", lambda i: spec(i, "NetworkPolicy", "loraplex-registry")["ingress"][0].pop("from")),
    "budget": ("selects no pods", lambda i: spec(i, "PodDisruptionBudget")["selector"].update(matchLabels={"a": "b"})),
    "scrape": ("not through one", lambda i: spec(i, "ServiceMonitor")["endpoints"][0].update(port="web")),
    "job": ("no label", lambda i: spec(i, "ServiceMonitor").update(jobLabel="job")),
    "pool-port": (
        "not where the replicas listen",
        lambda i: spec(i, "InferencePool").update(targetPorts=[{"number": 1}]),
    ),
    "pool-label": ("by whose names", lambda i: labels(i).pop("llm-d.ai/engine-type")),
    "picker": ("no Service", lambda i: spec(i, "InferencePool")["endpointPickerRef"].update(name="x")),
    "picker-port": ("show their metrics", lambda i: config_of_picker(i, "port: 50054", "port: 50052")),
    "picker-plugin": ("no plugin lora", lambda i: config_of_picker(i, "  - type: lora-affinity-scorer\n", "")),
    "scaled": (
        "there is no Deployment",
        lambda i: spec(i, "HorizontalPodAutoscaler")["scaleTargetRef"].update(name="x"),
    ),
    "replicas": ("set the replicas back", lambda i: i[INFERENCE]["spec"].update(replicas=2)),
    "account": ("no such ServiceAccount", lambda i: pod(i).update(serviceAccountName="default")),
    "registry": ("no Service", lambda i: config(i, "inference", "loraplex-registry-replicas", "registry")),
    "one address": (
        "is one address",
        lambda i: config(i, "inference", "loraplex-registry-replicas", "loraplex-registry"),
    ),
}

ACCESS: dict[str, tuple[str, Spoil]] = {
    "open replica": (
        "anybody may call loraplex.inference.v1.InferenceService",
        lambda i: config(i, "inference", "auth_token_file", "# auth_token_file"),
    ),
    "open registry": (
        "anybody may call loraplex.registry.v1.AdapterRegistryService",
        lambda i: config(i, "registry", "auth_token_file", "# auth_token_file"),
    ),
    "open to all": (
        "NetworkPolicy loraplex-inference: lets in every namespace",
        lambda i: i["Namespace", "loraplex"]["metadata"].update(annotations={"loraplex/callers": "anybody"}),
    ),
    "nameless replica": (
        "the replica shows none",
        lambda i: config(i, "inference", "registry_token_file", "# registry_token_file"),
    ),
    "key": (
        "Secret loraplex-tokens has no tokens.jsonl",
        lambda i: config(i, "inference", "tokens.toml", "tokens.jsonl"),
    ),
    "other's secret": (
        "Secret loraplex-tokens has no token",
        lambda i: volume(i, "replica-token")["secret"].update(secretName="loraplex-tokens"),
    ),
}

TLS: dict[str, tuple[str, Spoil]] = {
    "no client certificate": (
        "registry_cert: the registry asks for a certificate",
        lambda i: [drop_variable(container(i), f"REGISTRY_{name}") for name in ("CERT", "KEY")],
    ),
    "client's usage": (
        "registry_cert: the certificate in Secret loraplex-replica-tls is not for client auth",
        lambda i: spec(i, "Certificate", "loraplex-replica").update(usages=["digital signature", "server auth"]),
    ),
    "server's usage": (
        "tls_cert: the certificate in Secret loraplex-inference-tls is not for server auth",
        lambda i: spec(i, "Certificate").update(usages=["digital signature"]),
    ),
    "both": (
        "one certificate for both sides",
        lambda i: spec(i, "Certificate")["usages"].append("client auth"),
    ),
    "health": ("no health_listen", lambda i: drop_variable(container(i), "HEALTH_LISTEN")),
    "name": ("no certificate is for", lambda i: spec(i, "Certificate", "loraplex-registry").update(dnsNames=["x"])),
    "plain client": ("go together", lambda i: drop_variable(container(i), "REGISTRY_CA")),
    "secret": ("nobody issues", lambda i: spec(i, "Certificate").update(secretName="x")),
    "issuer": ("no Issuer", lambda i: spec(i, "Certificate")["issuerRef"].update(name="x")),
    "file": (
        "tls_cert: /etc/tls.crt is on no volume",
        lambda i: variable(i, "LORAPLEX_REGISTRY_TLS_CERT", REGISTRY).update(value="/etc/tls.crt"),
    ),
}


def config_of_picker(items, old, new):
    data = items["ConfigMap", "loraplex-endpoint-picker"]["data"]
    assert old in data["endpoint-picker.yaml"]
    data["endpoint-picker.yaml"] = data["endpoint-picker.yaml"].replace(old, new)


def drop_variable(of, suffix):
    before = len(of["env"])
    of["env"] = [item for item in of["env"] if not item["name"].endswith(suffix)]
    assert len(of["env"]) == before - 1


def test_the_documents_say_how_long_a_replica_takes_to_end() -> None:
    """The sum of the graces of its processes' stages, with what the manifests pause and what is spare."""
    (replica,) = [each for each in running(built()) if each.container["name"] == "inference"]
    beside_the_drain = replica.pod["terminationGracePeriodSeconds"] - replica.config.drain_grace
    docs = K8S.parents[1] / "docs"
    assert f"at least the first and {beside_the_drain:g} s" in (docs / "operate.md").read_text()
    upgrade = " ".join((docs / "upgrade.md").read_text().split())
    pause = replica.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert f"(`TimeoutStopSec`) above that by {beside_the_drain - pause:g} s" in upgrade
    assert f"`terminationGracePeriodSeconds` by {beside_the_drain:g} s" in upgrade


def _cases(table):
    return [pytest.param(words, spoil, id=name) for name, (words, spoil) in table.items()]


ALL = ("hpa", "inference-pool", "monitoring", "tracing")


def _assert_refused(check, chosen, words, spoil) -> None:
    errors = list(check(spoiled(chosen, spoil)))
    assert any(words in error for error in errors), errors


@pytest.mark.parametrize(("words", "spoil"), _cases(POLICY))
def test_security_rules(words: str, spoil: Spoil) -> None:
    _assert_refused(policy_errors, ALL, words, spoil)


@pytest.mark.parametrize(("words", "spoil"), _cases(SCHEMAS))
def test_schemas(words: str, spoil: Spoil) -> None:
    _assert_refused(schema_errors, ALL, words, spoil)


@pytest.mark.parametrize(("words", "spoil"), _cases(SERVICES))
def test_agreement_with_the_services(words: str, spoil: Spoil) -> None:
    _assert_refused(service_errors, ALL, words, spoil)


@pytest.mark.parametrize(("words", "spoil"), _cases(STORAGE))
def test_what_is_read_and_written(words: str, spoil: Spoil) -> None:
    _assert_refused(storage_errors, ALL, words, spoil)


@pytest.mark.parametrize(("words", "spoil"), _cases(WIRING))
def test_names_that_lead_nowhere(words: str, spoil: Spoil) -> None:
    _assert_refused(wiring_errors, ALL, words, spoil)


@pytest.mark.parametrize(("words", "spoil"), _cases(ACCESS))
def test_who_may_call(words: str, spoil: Spoil) -> None:
    _assert_refused(access_errors, ALL, words, spoil)


def test_the_services_know_their_callers_and_replicas_say_who_they_are() -> None:
    configs = {each.container["name"]: each.config for each in running(built())}
    assert configs["inference"].auth_token_file == configs["registry"].auth_token_file == TOKENS
    assert configs["inference"].registry_token_file == "/etc/loraplex-replica-token/token"
    mounted = {volume["secret"]["secretName"] for each in running(built()) for volume in secrets_of(each)}
    assert mounted == {"loraplex-tokens", "loraplex-replica-token"}
    assert not any(volume["secret"].get("optional") for each in running(built()) for volume in secrets_of(each))


def secrets_of(each):
    return [volume for volume in each.pod["volumes"] if "secret" in volume]


def test_with_tls_a_replica_shows_the_registry_a_certificate_of_a_clients_own() -> None:
    manifests = built("keda", "monitoring", "tls")
    (replica,) = [each for each in running(manifests) if each.container["name"] == "inference"]
    assert replica.config.registry_cert == "/etc/loraplex-replica-tls/tls.crt"
    assert replica.config.registry_key == "/etc/loraplex-replica-tls/tls.key"
    assert replica.config.tls_cert == "/etc/loraplex-tls/tls.crt"
    usages = {i["spec"]["secretName"]: i["spec"].get("usages") for i in manifests if i["kind"] == "Certificate"}
    server, client = ["digital signature", "server auth"], ["digital signature", "client auth"]
    assert usages == {
        "loraplex-ca": None,
        "loraplex-registry-tls": server,
        "loraplex-inference-tls": server,
        "loraplex-replica-tls": client,
        "loraplex-registry-client-tls": client,
    }


def test_for_trials_anybody_of_the_namespace_may_call() -> None:
    manifests = dev()
    assert [error for check in (access_errors, storage_errors, wiring_errors) for error in check(manifests)] == []
    assert not any(each.config.auth_token_file for each in running(manifests))
    assert not any(secrets_of(each) for each in running(manifests))
    (policy,) = [i["spec"] for i in manifests if (i["kind"], _plain(i)) == ("NetworkPolicy", "loraplex-inference")]
    assert [peer.keys() for rule in policy["ingress"] for peer in rule["from"]] == [{"podSelector"}]


@pytest.mark.parametrize("workload", ["loraplex-registry", "loraplex-inference"])
def test_pods_with_a_volume_of_one_node_stay_together(workload: str) -> None:
    manifests = copy.deepcopy(dev())
    (found,) = [i for i in manifests if i["kind"] == "Deployment" and i["metadata"]["name"] == workload]
    term = found["spec"]["template"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ][0]
    for spoil in (
        lambda: term.update(topologyKey="topology.kubernetes.io/zone"),
        lambda: term.update(topologyKey="kubernetes.io/hostname", labelSelector={"matchLabels": {"a": "b"}}),
        lambda: found["spec"]["template"]["spec"].pop("affinity"),
    ):
        spoil()
        wanted = f"{workload}: the volume loraplex-models is one node's, and its pods may run on several"
        assert list(storage_errors(manifests)) == [wanted]


@cache
def dev() -> list[dict[str, Any]]:
    return Build(K8S / "overlays" / "dev").manifests()


@pytest.mark.parametrize(("words", "spoil"), _cases(TLS))
def test_tls(words: str, spoil: Spoil) -> None:
    rules = [check for check in CHECKS if check is not schema_errors]  # which is slow, and of its own kind
    every = lambda manifests: [error for check in rules for error in check(manifests)]  # noqa: E731
    _assert_refused(every, ("keda", "monitoring", "tls"), words, spoil)
