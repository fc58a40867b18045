"""Manifests against schemas: Kubernetes' own kinds by kubernetes-validate, the others by the files in `schemas/`.

Those files say less than the CRDs' own, and refuse every field that they do not list: a typing error has no other
place to hide. A kind that has no schema is an error.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from deploy.k8s.builds import K8S, Manifest

METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"$ref": "#/$defs/strings"},
        "annotations": {"$ref": "#/$defs/strings"},
    },
}


def schema_errors(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What is wrong with any of them."""
    for item in manifests:
        errors = custom_errors(item) if _is_custom(item) else _core_errors(json.dumps(item))
        yield from (f"{item['kind']} {item['metadata']['name']}: {error}" for error in errors)


def custom_errors(item: Manifest) -> Iterator[str]:
    """What is wrong with an object of a custom kind."""
    schema = _custom_schemas().get((item["apiVersion"], item["kind"]))
    if schema is None:
        yield f"there is no schema of {item['apiVersion']} {item['kind']}"
        return
    for error in Draft202012Validator(schema).iter_errors(item):
        yield f"{error.json_path}: {error.message}"


def _is_custom(item: Manifest) -> bool:
    group = item["apiVersion"].rpartition("/")[0]
    # Kubernetes' own groups have no dot or end with k8s.io; those of its projects that bring CRDs end so as well.
    return "." in group and (not group.endswith(".k8s.io") or group == "inference.networking.k8s.io")


@cache
def _core_errors(item: str) -> tuple[str, ...]:
    """What is wrong with an object, given as JSON, of one of Kubernetes' own kinds."""
    try:
        kubernetes_validate.validate(json.loads(item), kubernetes_validate.latest_version(), strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return (str(error),)
    return ()


@cache
def _custom_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    definitions = yaml.safe_load((K8S / "schemas" / "definitions.yaml").read_text())
    schemas = {}
    for path in (K8S / "schemas").glob("[A-Z]*.yaml"):
        about = yaml.safe_load(path.read_text())
        schemas[about["apiVersion"], path.stem] = {
            "$defs": definitions,
            "type": "object",
            "additionalProperties": False,
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {"apiVersion": {}, "kind": {}, "metadata": METADATA, "spec": about["spec"]},
        }
    return schemas
