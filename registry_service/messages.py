"""Rows as protobuf messages."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.registry.v1 import registry_pb2, resources_pb2
from registry_service.models import Adapter, AdapterVersion, BaseModel
from registry_service.records import LoggedChange
from registry_service.replicas import ShownReplica
from registry_service.repository import AdapterView, AliasView
from registry_service.service import Resolution
from registry_service.serving import Serving, ShownAdapter
from registry_service.watch import Batch
from shared.references import adapter_name, alias_name, base_model_name, version_name

MAX_WATCH_CHANGES = 500
MAX_WATCH_BYTES = 1 << 20  # of changes in one message, unless one alone is larger

# Made once for each row in the adapter cache, and gone with it: to make them takes a fifth of a resolution.
_resolved: WeakKeyDictionary[AdapterVersion, resources_pb2.AdapterVersion] = WeakKeyDictionary()


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


def shown_adapter_message(shown: ShownAdapter) -> resources_pb2.Adapter:
    """An adapter with its default version and the replicas that serve it."""
    message = adapter_message(shown.view)
    message.num_versions = shown.num_versions
    if (default := shown.default) is not None:
        message.default_version.CopyFrom(
            resources_pb2.DefaultVersion(
                version=default.number, digest=default.digest, rank=default.rank, size_bytes=default.size_bytes
            )
        )
    message.serving.CopyFrom(_serving(shown.serving))
    return message


def _serving(serving: Serving) -> resources_pb2.ServingStatus:
    status = resources_pb2.ServingStatus
    return status(
        ready_replicas=serving.ready,
        target_replicas=serving.target,
        not_ready=[status.NotReady(**not_ready._asdict()) for not_ready in serving.not_ready],
        versions=[
            status.VersionStatus(version=number, ready_replicas=ready)
            for number, ready in sorted(serving.by_version.items())
        ],
    )


def _alias(adapter: Adapter, alias: AliasView) -> resources_pb2.AdapterAlias:
    return resources_pb2.AdapterAlias(
        name=alias_name(adapter.namespace, adapter.name, alias.name),
        targets=_targets(alias.targets),
        update_time=_time(alias.update_time),
        previous_targets=_targets(alias.previous),
    )


def _targets(targets: Sequence[tuple[int, float]]) -> list[resources_pb2.AliasTarget]:
    return [resources_pb2.AliasTarget(version=number, weight=weight) for number, weight in targets]


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
    versions = [_resolved_version(found.adapter, target.version) for target in found.targets]
    return registry_pb2.ResolveAdapterResponse(
        version=versions[0],
        adapter_uid=found.adapter.uid,
        alias=found.alias,
        targets=[
            registry_pb2.ResolvedTarget(version=version, weight=target.weight)
            for version, target in zip(versions, found.targets, strict=True)
        ],
        ttl=duration(ttl),
        registry_revision=found.revision,
    )


def _resolved_version(adapter: Adapter, row: AdapterVersion) -> resources_pb2.AdapterVersion:
    """As `version_message`, of a row that nobody changes."""
    message = _resolved.get(row)
    if message is None:
        message = _resolved[row] = version_message(adapter, row)
    return message


def watch_messages(batch: Batch) -> Iterator[registry_pb2.WatchAdaptersResponse]:
    """What a watch is told, in messages of bounded size that can each be resumed after."""
    changes: list[registry_pb2.AdapterChange] = []
    num_bytes = 0
    for index, change in enumerate(batch.changes):
        message = _change_message(change)
        num_bytes += message.ByteSize()
        if changes and (len(changes) == MAX_WATCH_CHANGES or num_bytes > MAX_WATCH_BYTES):
            token = batch.token_after(batch.changes[index - 1])
            yield registry_pb2.WatchAdaptersResponse(
                changes=changes, resume_token=token.text(), registry_revision=token.position.revision
            )
            changes, num_bytes = [], message.ByteSize()
        changes.append(message)
    yield registry_pb2.WatchAdaptersResponse(
        changes=changes,
        resume_token=batch.token.text(),
        snapshot_complete=batch.is_complete,
        registry_revision=batch.token.position.revision,
    )


@lru_cache(maxsize=1024)  # all watches are told the same
def _change_message(change: LoggedChange) -> registry_pb2.AdapterChange:
    record = change.record
    is_deleted = record.adapter.delete_time is not None
    versions = [] if is_deleted else [record.versions[number] for number in sorted(record.versions)]
    return registry_pb2.AdapterChange(
        type=registry_pb2.AdapterChange.TYPE_DELETE if is_deleted else registry_pb2.AdapterChange.TYPE_UPSERT,
        adapter=adapter_message(record.view),
        versions=[version_message(record.adapter, version) for version in versions],
        revision=change.revision,
        deleted_version=change.deleted_version or 0,
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


def replica_message(shown: ShownReplica) -> registry_pb2.Replica:
    """A replica and what it holds."""
    row, state = shown.replica, registry_pb2.ResidentState
    return registry_pb2.Replica(
        name=row.name,
        base_model=base_model_name(row.base_model),
        observed_revision=row.observed_revision,
        resident=[
            state(digest=r.digest, level=state.Level.Value(f"LEVEL_{r.level}"), pinned=r.pinned, reason=r.reason)
            for r in shown.residents
        ],
        lease_expire_time=_time(row.lease_expire_time),
    )


def duration(seconds: float) -> Duration:
    """A span of time."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def _time(value: datetime | None) -> Timestamp | None:
    if value is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(value)
    return stamp
