"""Rows as protobuf messages."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.registry.v1 import registry_pb2, resources_pb2
from registry_service.models import Adapter, AdapterVersion, BaseModel
from registry_service.repository import AdapterView, AliasView
from registry_service.service import Resolution
from shared.references import adapter_name, alias_name, base_model_name, version_name


def adapter_message(view: AdapterView) -> resources_pb2.Adapter:
    """An adapter with its aliases."""
    row = view.adapter
    return resources_pb2.Adapter(
        name=adapter_name(row.namespace, row.name),
        uid=row.uid,
        base_model=base_model_name(row.base_model),
        default_alias=row.default_alias,
        residency=resources_pb2.Adapter.Residency.Value(f"RESIDENCY_{row.residency}"),
        labels=row.labels,
        annotations=row.annotations,
        description=row.description,
        aliases=[_alias(row, alias) for alias in view.aliases],
        latest_version=view.latest_version,
        create_time=_time(row.create_time),
        update_time=_time(row.update_time),
        delete_time=_time(row.delete_time),
        purge_time=_time(row.purge_time),
        etag=row.etag,
    )


def _alias(adapter: Adapter, alias: AliasView) -> resources_pb2.AdapterAlias:
    return resources_pb2.AdapterAlias(
        name=alias_name(adapter.namespace, adapter.name, alias.name),
        targets=[resources_pb2.AliasTarget(version=number, weight=weight) for number, weight in alias.targets],
        update_time=_time(alias.update_time),
    )


def version_message(adapter: Adapter, row: AdapterVersion) -> resources_pb2.AdapterVersion:
    """A version; without a name if it was only validated."""
    return resources_pb2.AdapterVersion(
        name=version_name(adapter.namespace, adapter.name, row.number) if row.number else "",
        uid=row.uid if row.number else "",
        source=resources_pb2.AdapterSource(**row.source),
        pinned_sources=[_pinned_source(source) for source in row.pinned_sources],
        manifest=resources_pb2.Manifest(files=[resources_pb2.Manifest.File(**file) for file in row.manifest]),
        digest=row.digest,
        lora_config=resources_pb2.LoraConfig(**row.lora_config),
        size_bytes=row.size_bytes,
        num_tensors=row.num_tensors,
        state=resources_pb2.AdapterVersion.State.Value(f"STATE_{row.state}"),
        creator=row.creator,
        create_time=_time(row.create_time),
        delete_time=_time(row.delete_time),
        purge_time=_time(row.purge_time),
        base_model=base_model_name(adapter.base_model),
        base_model_fingerprint=row.base_model_fingerprint,
        warnings=row.warnings,
    )


def _pinned_source(source: Mapping[str, Any]) -> resources_pb2.PinnedSource:
    objects = [resources_pb2.PinnedSource.PinnedObject(**entry) for entry in source["objects"]]
    return resources_pb2.PinnedSource(
        uri=source["uri"], revision=source["revision"], objects=objects, credential_ref=source["credential_ref"]
    )


def resolution_message(found: Resolution, ttl: float) -> registry_pb2.ResolveAdapterResponse:
    """What a reference means; may be used for `ttl` seconds."""
    duration = Duration()
    duration.FromNanoseconds(int(ttl * 1e9))
    return registry_pb2.ResolveAdapterResponse(
        version=version_message(found.adapter, found.targets[0].version),
        adapter_uid=found.adapter.uid,
        alias=found.alias,
        targets=[
            registry_pb2.ResolvedTarget(version=version_message(found.adapter, target.version), weight=target.weight)
            for target in found.targets
        ],
        ttl=duration,
        registry_revision=found.revision,
    )


def base_model_message(row: BaseModel) -> resources_pb2.BaseModel:
    """A base model."""
    return resources_pb2.BaseModel(
        name=base_model_name(row.id),
        architecture=row.architecture,
        fingerprint=row.fingerprint,
        num_modules=row.num_modules,
        create_time=_time(row.create_time),
        weights_fingerprint=row.weights_fingerprint or "",
    )


def _time(value: datetime | None) -> Timestamp | None:
    if value is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(value)
    return stamp
