"""Whether what names something names what is there: Services, policies, scrapes, pools, autoscalers, certificates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from deploy.k8s.access import GIVEN
from deploy.k8s.builds import Manifest
from deploy.k8s.services import Running, SettingsError, port_of, running
from inference_service.config import InferenceConfig

Labels = Mapping[str, str]


def wiring_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Names, ports and labels that lead nowhere."""
    try:
        found = {each.workload["metadata"]["name"]: each for each in running(manifests)}
    except SettingsError:
        return  # `service_errors` tells
    pods = {i["metadata"]["name"]: i["spec"]["template"] for i in manifests if i["kind"] == "Deployment"}
    yield from _account_errors(manifests, pods)
    for item in manifests:
        name = f"{item['kind']} {item['metadata']['name']}"
        errors: Iterable[str]
        match item["kind"]:
            case "Service":
                errors = _service_errors(item["spec"], pods, found)
            case "NetworkPolicy":
                errors = _policy_errors(item["spec"], pods)
            case "PodDisruptionBudget":
                errors = _none_selected(item["spec"]["selector"], pods)
            case "ServiceMonitor":
                errors = _scrape_errors(item["spec"], manifests)
            case "InferencePool":
                errors = _pool_errors(item["spec"], pods, found, manifests)
            case "HorizontalPodAutoscaler" | "ScaledObject":
                errors = _target_errors(item["spec"], manifests)
            case "ConfigMap":
                errors = _picker_errors(item["data"], found)
            case _:
                continue
        yield from (f"{name}: {error}" for error in errors)
    for each in found.values():
        yield from (f"{each.name}: {error}" for error in _registry_errors(each, manifests))
        yield from (f"{each.name}: {error}" for error in _certificate_errors(each, manifests))
        yield from (f"{each.name}: {error}" for error in _trace_errors(each, manifests))


def selected(selector: Mapping[str, Any], pods: Mapping[str, Any]) -> dict[str, Any]:
    """The pods (name of the workload → template) that a label selector means."""
    return {name: pod for name, pod in pods.items() if _matches(selector, pod["metadata"]["labels"])}


def _matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


def _none_selected(selector: Mapping[str, Any], pods: Mapping[str, Any]) -> list[str]:
    return [] if selected(selector, pods) else ["selects no pods"]


def _ports(pod: Mapping[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for c in pod["spec"]["containers"] for port in c.get("ports", [])}


def _service_errors(spec: Mapping[str, Any], pods: Mapping[str, Any], found: Mapping[str, Running]) -> Iterator[str]:
    chosen = selected({"matchLabels": spec["selector"]}, pods)
    if len(chosen) != 1:
        yield f"selects {sorted(chosen)}, not one workload"
        return
    (name,) = chosen
    ports = _ports(chosen[name])
    for port in spec["ports"]:
        target = port["targetPort"]
        number = ports.get(target) if isinstance(target, str) else target
        if number not in ports.values() or number != port["port"]:
            yield f"port {port['port']} leads to {target}, and the pods have {ports}"
        if port["name"] == "grpc":
            wanted = "https" if name in found and found[name].config.tls_cert else "kubernetes.io/h2c"
            if port.get("appProtocol") != wanted:
                yield f"appProtocol is not {wanted}"


def _policy_errors(spec: Mapping[str, Any], pods: Mapping[str, Any]) -> Iterator[str]:
    chosen = selected(spec["podSelector"], pods)
    if not chosen:
        yield "selects no pods"
    open_ports = {number for pod in chosen.values() for number in _ports(pod).values()}
    for rule in spec.get("ingress", []):
        if not rule.get("from") or not rule.get("ports"):
            yield "lets in anybody, or to any port"
        yield from (
            f"port {p['port']} is not one of the pods'" for p in rule.get("ports", []) if p["port"] not in open_ports
        )
    for rule in spec.get("egress", []):
        if not rule.get("ports"):
            yield "lets out to any port"
        for target in [peer["podSelector"] for peer in rule.get("to", []) if peer.keys() == {"podSelector"}]:
            numbers = {number for pod in selected(target, pods).values() for number in _ports(pod).values()}
            yield from (f"port {p['port']} is not one of {target}'s" for p in rule["ports"] if p["port"] not in numbers)


def _scrape_errors(spec: Mapping[str, Any], manifests: Sequence[Manifest]) -> Iterator[str]:
    services = [
        i for i in manifests if i["kind"] == "Service" and _matches(spec["selector"], i["metadata"].get("labels", {}))
    ]
    for endpoint in spec["endpoints"]:
        found = [i["metadata"]["name"] for i in services for p in i["spec"]["ports"] if p["name"] == endpoint["port"]]
        if len(found) != 1:
            yield f"port {endpoint['port']} is scraped through {found}, not through one Service"
    for service in services:
        if spec.get("jobLabel") not in service["metadata"]["labels"]:
            yield f"Service {service['metadata']['name']} has no label {spec.get('jobLabel')}"


def _pool_errors(
    spec: Mapping[str, Any], pods: Mapping[str, Any], found: Mapping[str, Running], manifests: Sequence[Manifest]
) -> Iterator[str]:
    chosen = selected(spec["selector"], pods)
    configs = [found[name].config for name in chosen if name in found]
    ports = [port["number"] for port in spec["targetPorts"]]
    if not configs or any(ports != [port_of(config.listen)] for config in configs):
        yield f"{ports} is not where the replicas listen"
    if spec.get("appProtocol") != "kubernetes.io/h2c" or any(config.tls_cert for config in configs):
        yield "replicas behind a pool speak HTTP/2 in the clear"
    if any(pod["metadata"]["labels"].get("llm-d.ai/engine-type") != "vllm" for pod in chosen.values()):
        yield "the picker does not know by whose names to read the metrics"
    picker = spec["endpointPickerRef"]
    services = {i["metadata"]["name"]: i["spec"] for i in manifests if i["kind"] == "Service"}
    if picker["port"]["number"] not in [p["port"] for p in services.get(picker["name"], {}).get("ports", [])]:
        yield f"there is no Service {picker['name']} with this port"


def _picker_errors(data: Mapping[str, str], found: Mapping[str, Running]) -> Iterator[str]:
    if "endpoint-picker.yaml" not in data:
        return
    config = yaml.safe_load(data["endpoint-picker.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    replicas = [each.config for each in found.values() if isinstance(each.config, InferenceConfig)]
    if any(plugins["metrics-data-source"]["port"] != port_of(each.metrics_listen) for each in replicas):
        yield "metrics-data-source does not read where the replicas show their metrics"
    used = [ref["pluginRef"] for profile in config["schedulingProfiles"] for ref in profile["plugins"]]
    yield from (f"no plugin {name}" for name in used if name not in plugins)


def _target_errors(spec: Mapping[str, Any], manifests: Sequence[Manifest]) -> Iterator[str]:
    target = spec["scaleTargetRef"]
    found = [i for i in manifests if i["kind"] == target["kind"] and i["metadata"]["name"] == target["name"]]
    if not found:
        yield f"there is no {target['kind']} {target['name']}"
    elif "replicas" in found[0]["spec"]:
        yield "every apply would set the replicas back"


def _account_errors(manifests: Sequence[Manifest], pods: Mapping[str, Any]) -> Iterator[str]:
    accounts = {item["metadata"]["name"] for item in manifests if item["kind"] == "ServiceAccount"}
    for name, pod in pods.items():
        if pod["spec"].get("serviceAccountName") not in accounts:
            yield f"{name}: there is no such ServiceAccount"


def _registry_errors(each: Running, manifests: Sequence[Manifest]) -> Iterator[str]:
    """A replica's registry is a headless Service, and known by its certificate if there is one."""
    if not isinstance(each.config, InferenceConfig):
        return
    host = each.config.registry.removeprefix("dns:///").partition(":")[0]
    services = {i["metadata"]["name"]: i["spec"] for i in manifests if i["kind"] == "Service"}
    spec = services.get(host, {})
    if port_of(each.config.registry) not in [port["port"] for port in spec.get("ports", [])]:
        yield f"registry: there is no Service {each.config.registry}"
    elif spec.get("clusterIP") != "None" or not each.config.registry.startswith("dns:///"):
        yield f"registry: {each.config.registry} is one address, so one connection to one of the registries"
    certificates = [i["spec"] for i in manifests if i["kind"] == "Certificate"]
    names = {name for spec in certificates for name in spec.get("dnsNames", [])}
    if bool(certificates) != bool(each.config.registry_ca):
        yield "registry_ca and the registry's certificate go together"
    elif certificates and host not in names:
        yield f"registry: no certificate is for {host}"


def _trace_errors(each: Running, manifests: Sequence[Manifest]) -> Iterator[str]:
    """A policy lets traces out to where they are sent."""
    if not each.config.otlp_endpoint:
        return
    port = port_of(each.config.otlp_endpoint.rstrip("/"))
    labels = each.workload["spec"]["template"]["metadata"]["labels"]
    policies = [i["spec"] for i in manifests if i["kind"] == "NetworkPolicy"]
    rules = [rule for spec in policies if _matches(spec["podSelector"], labels) for rule in spec.get("egress", [])]
    if not any(port == allowed["port"] for rule in rules for allowed in rule["ports"]):
        yield f"otlp_endpoint: no NetworkPolicy lets out to port {port}"


def _certificate_errors(each: Running, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Secrets are given, or hold certificates that are issued, by issuers that are there."""
    issued = {i["spec"]["secretName"] for i in manifests if i["kind"] == "Certificate"}
    issuers = {i["metadata"]["name"] for i in manifests if i["kind"] == "Issuer"}
    for volume in each.pod.get("volumes", []):
        if "secret" in volume and volume["secret"]["secretName"] not in {*issued, *GIVEN}:
            yield f"nobody issues Secret {volume['secret']['secretName']}"
    for item in manifests:
        if item["kind"] == "Certificate" and item["spec"]["issuerRef"]["name"] not in issuers:
            yield f"there is no Issuer {item['spec']['issuerRef']['name']}"
