"""Reads UpdateAdapter requests: which columns of the adapter's row become what."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from loraplex.registry.v1 import registry_pb2, resources_pb2
from registry_service.checks import MAX_ANNOTATION_CHARS, MAX_LABEL_CHARS, Checks
from registry_service.requests import adapter_reference
from shared.references import LATEST, Reference, check_alias

MAX_PATHS = 64
_RESIDENCIES = {
    resources_pb2.Adapter.RESIDENCY_UNSPECIFIED: "ON_DEMAND",
    resources_pb2.Adapter.RESIDENCY_ON_DEMAND: "ON_DEMAND",
    resources_pb2.Adapter.RESIDENCY_PRELOAD: "PRELOAD",
    resources_pb2.Adapter.RESIDENCY_PINNED: "PINNED",
}


class AdapterUpdate(NamedTuple):
    """A checked request. `fields`: columns of `models.Adapter` and their new values."""

    name: Reference
    fields: Mapping[str, Any]
    etag: str


def adapter_update(request: registry_pb2.UpdateAdapterRequest, own_namespace: str) -> AdapterUpdate:
    """Every wrong field of an UpdateAdapter request at once, or the request."""
    checks, adapter = Checks(), request.adapter
    nobody = Reference("", "")
    name = checks.checked(lambda: adapter_reference(adapter.name, own_namespace, "adapter.name"), nobody)
    fields = {path: _READERS[path](adapter, checks) for path in _paths(request, checks)}
    checks.finish()
    return AdapterUpdate(name, fields, adapter.etag)


def _paths(request: registry_pb2.UpdateAdapterRequest, checks: Checks) -> list[str]:
    """Which fields to set: those of the mask, without one those that have a value."""
    paths = list(dict.fromkeys(request.update_mask.paths))
    if len(paths) > MAX_PATHS:
        checks.wrong("update_mask", f"must not have more than {MAX_PATHS} paths")
        return []
    if paths == ["*"]:
        return list(_READERS)
    if not paths:
        return [field.name for field, _ in request.adapter.ListFields() if field.name in _READERS]
    for path in paths:
        if path not in _READERS:
            is_field = path in request.adapter.DESCRIPTOR.fields_by_name
            reason = "cannot be updated" if is_field else "is not a field of an adapter"
            checks.wrong("update_mask", f"{path!r:.100} {reason}; there are {', '.join(_READERS)}")
    return [path for path in paths if path in _READERS]


def _labels(adapter: resources_pb2.Adapter, checks: Checks) -> dict[str, str]:
    checks.pairs("adapter.labels", adapter.labels, MAX_LABEL_CHARS)
    return dict(adapter.labels)


def _annotations(adapter: resources_pb2.Adapter, checks: Checks) -> dict[str, str]:
    checks.pairs("adapter.annotations", adapter.annotations, MAX_ANNOTATION_CHARS)
    return dict(adapter.annotations)


def _description(adapter: resources_pb2.Adapter, checks: Checks) -> str:
    checks.description("adapter.description", adapter.description)
    return adapter.description


def _default_alias(adapter: resources_pb2.Adapter, checks: Checks) -> str:
    return checks.checked(lambda: check_alias(adapter.default_alias or LATEST, "adapter.default_alias"), LATEST)


def _residency(adapter: resources_pb2.Adapter, checks: Checks) -> str:
    if adapter.residency not in _RESIDENCIES:
        checks.wrong("adapter.residency", f"{adapter.residency} is not a residency")
    return _RESIDENCIES.get(adapter.residency, "")


_READERS: dict[str, Callable[[resources_pb2.Adapter, Checks], Any]] = {
    "labels": _labels,
    "annotations": _annotations,
    "description": _description,
    "default_alias": _default_alias,
    "residency": _residency,
}
