"""Whether callers are known wherever the services run, and whether what they show each other is what is asked for."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from deploy.k8s.builds import Manifest
from deploy.k8s.services import Running, SettingsError, running
from inference_service.config import InferenceConfig

OPEN = ("loraplex/callers", "anybody")  # annotation of a namespace that is for trials
# Made by whoever applies the manifests (docs/operate.md): Secrets and their keys.
GIVEN: Mapping[str, frozenset[str]] = {
    "loraplex-tokens": frozenset({"tokens.toml"}),
    "loraplex-replica-token": frozenset({"token"}),
}
_USAGES = {"tls_cert": "server auth", "registry_cert": "client auth"}
_SECRET_FILES = ("auth_token_file", "registry_token_file")


def access_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Services that let in anybody, and credentials that nobody takes or gives."""
    try:
        found = [each for each in running(manifests) if each.container["name"] != "migrate"]
    except SettingsError:
        return  # `service_errors` tells
    is_open = any(_is_open(item) for item in manifests if item["kind"] == "Namespace")
    if is_open:
        yield from _door_errors(manifests)
    registries = [each for each in found if not isinstance(each.config, InferenceConfig)]
    certificates = {i["spec"]["secretName"]: i["spec"] for i in manifests if i["kind"] == "Certificate"}
    for each in found:
        errors = [*_key_errors(each), *_usage_errors(each, certificates)]
        if not is_open and not _knows_callers(each.config):
            errors.append(f"anybody may call {each.program.service}: set auth_token_file")
        if isinstance(each.config, InferenceConfig):
            errors += _introduction_errors(each.config, registries)
        yield from (f"{each.name}: {error}" for error in errors)


def _is_open(namespace: Manifest) -> bool:
    key, value = OPEN
    return bool(namespace["metadata"].get("annotations", {}).get(key) == value)


def _knows_callers(config: Any) -> bool:
    return bool(config.auth_token_file or config.auth_jwks_file or config.auth_certificates)


def _door_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Where callers are not known, at least not everybody may connect."""
    for item in manifests:
        if item["kind"] == "NetworkPolicy":
            peers = [peer for rule in item["spec"].get("ingress", []) for peer in rule.get("from", [])]
            if any(peer.get("namespaceSelector") == {} for peer in peers):
                yield f"NetworkPolicy {item['metadata']['name']}: lets in every namespace, and anybody may call"


def _introduction_errors(config: InferenceConfig, registries: Sequence[Running]) -> Iterator[str]:
    """What a replica shows the registry."""
    for registry in registries:
        if _knows_callers(registry.config) and not (config.registry_token_file or config.registry_cert):
            yield "registry_token_file: the registry asks for a token, and the replica shows none"
        if registry.config.tls_client_ca and not config.registry_cert:
            yield "registry_cert: the registry asks for a certificate, and the replica shows none"


def _key_errors(each: Running) -> Iterator[str]:
    """Files of Secrets that are given are keys of theirs."""
    for name in _SECRET_FILES:
        path = getattr(each.config, name, "")
        volume = each.volume_at(path) if path else None
        if volume is None or "secret" not in volume[0]:
            continue
        secret = volume[0]["secret"]["secretName"]
        if PurePosixPath(path).name not in GIVEN.get(secret, ()):
            yield f"{name}: Secret {secret} has no {PurePosixPath(path).name}"


def _usage_errors(each: Running, certificates: Mapping[str, Any]) -> Iterator[str]:
    """A certificate is for what it is shown for."""
    for name, usage in _USAGES.items():
        path = getattr(each.config, name, "")
        volume = each.volume_at(path) if path else None
        if volume is not None and "secret" in volume[0]:
            secret = volume[0]["secret"]["secretName"]
            usages = certificates.get(secret, {}).get("usages", [])
            if usage not in usages:
                yield f"{name}: the certificate in Secret {secret} is not for {usage}"
            if set(_USAGES.values()) <= set(usages):
                yield f"{name}: one certificate for both sides: who has a server's key may call as a client"
