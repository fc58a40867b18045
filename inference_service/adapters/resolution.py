"""What the registry says a reference means, checked and without protobuf's types."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from inference_service.adapters.sizes import PackedSize, packed_size
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.adapter_format.texts import MAX_BYTES
from shared.digest import FileEntry, check_digest, manifest_digest
from shared.errors import (
    BaseModelMismatch,
    DigestMismatch,
    InvalidArgument,
    RegistryUnavailable,
    SourceUnavailable,
)
from shared.references import base_model_name, parse_reference, parse_version_name
from shared.sources.resolver import PinnedObject, PinnedSource
from shared.weighted_choice import choose

RESTARTED_RETRY_SECONDS = 1.0


class BaseModelIdentity(NamedTuple):
    """The base model that this replica serves: its id and `shared.base_model.fingerprint` of its config."""

    id: str
    fingerprint: str


class ResolvedVersion(NamedTuple):
    """One version of an adapter. `name` is its resource name, `number` the last part of it.

    `files` is the manifest, whose digest is `digest`; `sources` are tried in order; `rank` is the modules' greatest;
    `packed` is what is known of its blob's size.
    """

    name: str
    number: int
    adapter_uid: str
    digest: str
    files: tuple[FileEntry, ...]
    sources: tuple[PinnedSource, ...]
    rank: int
    packed: PackedSize = PackedSize()

    @property
    def texts(self) -> tuple[FileEntry, ...]:
        """The tokenizer and chat-template files that the adapter brings."""
        return tuple(file for file in self.files if file.path in MAX_BYTES)


def of_another_process(digest: str, files: tuple[FileEntry, ...]) -> ResolvedVersion:
    """What is on disk under a digest that this process has not resolved: nobody knows its name, or a source."""
    return ResolvedVersion(digest, 0, "", digest, files, sources=(), rank=0)


def forgotten(digest: str) -> SourceUnavailable:
    """Of a digest that a process before this one prepared, and of which nothing is here any more: preparing helps."""
    text = "the adapter process has restarted since this adapter was prepared"
    return SourceUnavailable(text, metadata={"digest": digest}, retry_after=RESTARTED_RETRY_SECONDS)


class Resolution(NamedTuple):
    """One answer of the registry: the alias that was followed and its targets by weight. `ttl` is in seconds."""

    adapter_uid: str
    alias: str
    targets: tuple[tuple[ResolvedVersion, float], ...]
    ttl: float

    def choose(self, key: str) -> ResolvedVersion:
        """The target for `key`; the same for equal keys, spread over all targets by weight for different ones."""
        if len(self.targets) == 1:
            return self.targets[0][0]
        weights = [(version.number, weight) for version, weight in self.targets]
        number = choose(self.adapter_uid, self.alias, key, weights)
        return next(version for version, _ in self.targets if version.number == number)


def read_resolution(answer: Any, reference: str, base_model: BaseModelIdentity) -> Resolution:
    """Check a `ResolveAdapterResponse` that answers the canonical `reference`.

    Raises:
        BaseModelMismatch: a target is for another base model, or was validated against another one of this name.
        DigestMismatch: a manifest is not what its digest says.
        RegistryUnavailable: the answer is malformed in any other way; metadata names the `field`.
    """
    try:
        targets = [(target.version, target.weight) for target in answer.targets] or [(answer.version, 1.0)]
        resolution = Resolution(
            answer.adapter_uid,
            answer.alias,
            tuple((_version(version, answer.adapter_uid), weight) for version, weight in targets),
            _seconds(answer.ttl),
        )
        _check_answers(resolution, reference)
        for version, _ in targets:
            _check_base_model(version, base_model)
        resolution.choose("")
    except InvalidArgument as error:
        field = error.violations[0].field if error.violations else ""
        message = f"the registry's answer for {reference} is malformed: {error.message}"
        raise RegistryUnavailable(message, metadata={"field": field}) from None
    return resolution


def _version(message: Any, adapter_uid: str) -> ResolvedVersion:
    files = tuple(FileEntry(file.path, file.size_bytes, file.sha256) for file in message.manifest.files)
    digest = check_digest(message.digest, "version.digest")
    if manifest_digest(files) != digest:
        problem = f"the manifest of {message.name} is not that of {digest}; register its source as a new version"
        raise DigestMismatch(problem, metadata={"digest": digest})
    for name in (CONFIG, WEIGHTS):
        if all(file.path != name for file in files):
            raise InvalidArgument.of("version.manifest.files", f"{name} is missing")
    if any("/" in file.path for file in files):
        raise InvalidArgument.of("version.manifest.files.path", "must be a plain file name")
    return ResolvedVersion(
        name=message.name,
        number=parse_version_name(message.name, "version.name").version,
        adapter_uid=adapter_uid,
        digest=digest,
        files=files,
        sources=tuple(_pinned(source) for source in message.pinned_sources),
        rank=message.lora_config.rank,
        packed=packed_size(message.lora_config),
    )


def _pinned(source: Any) -> PinnedSource:
    objects = tuple(PinnedObject(item.path, item.version_id, item.etag) for item in source.objects)
    return PinnedSource(source.uri, source.revision, objects, source.credential_ref)


def _check_answers(resolution: Resolution, reference: str) -> None:
    """The targets must be versions of what was asked for, and different ones."""
    asked = parse_reference(reference, "default")
    versions: Sequence[ResolvedVersion] = [version for version, _ in resolution.targets]
    for version in versions:
        name = parse_version_name(version.name, "version.name")
        if (name.namespace, name.adapter) != (asked.namespace, asked.adapter):
            raise InvalidArgument.of("version.name", f"{version.name} is another adapter")
        if asked.version not in (None, version.number) or asked.digest not in (None, version.digest):
            raise InvalidArgument.of("version.name", f"{version.name} is another version")
    if len({version.number for version in versions}) != len(versions):
        raise InvalidArgument.of("targets.version", "a version occurs twice")


def _check_base_model(message: Any, base_model: BaseModelIdentity) -> None:
    metadata = {"base_model": base_model.id, "adapter_base_model": message.base_model}
    if message.base_model != base_model_name(base_model.id):
        text = f"{message.name} is for {message.base_model}; this replica serves {base_model_name(base_model.id)}"
        raise BaseModelMismatch(text, metadata=metadata)
    if message.base_model_fingerprint not in ("", base_model.fingerprint):
        text = f"{message.name} was validated against another {base_model.id} than this replica serves"
        raise BaseModelMismatch(text, metadata=metadata)


def _seconds(duration: Any) -> float:
    seconds = duration.seconds + duration.nanos / 1e9
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
