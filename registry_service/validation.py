"""Reads an adapter's files once: hashes every byte, checks every tensor against the base model, and plans the binding.

All of it blocks and belongs in a thread. Nothing is mapped into memory, so a file that shrinks meanwhile is an error
and not a crash.
"""

import hashlib
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shared.adapter_format.binding import BindingPlan, plan
from shared.adapter_format.config import LoraConfig, parse_adapter_config
from shared.adapter_format.files import adapter_files
from shared.adapter_format.finite import FiniteScan
from shared.adapter_format.header import MAX_HEADER_BYTES, read_header
from shared.adapter_format.reasons import file_invalid
from shared.base_model import MODULES, ModelConfig, default_id, linear_shape
from shared.digest import FileEntry, manifest_digest
from shared.errors import AdapterInvalid, SourceUnavailable
from shared.sources.resolver import PinnedSource, open_source

CHUNK_BYTES = 1 << 20


class Limits(NamedTuple):
    """Largest files that are read, in bytes."""

    config: int
    weights: int


class LoraFacts(NamedTuple):
    """What the adapter does to its base model. `device_bytes` counts 2 bytes a parameter."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool
    num_modules: int
    device_bytes: int


class ValidatedAdapter(NamedTuple):
    """An adapter that fits its base model, and the digest of exactly the bytes that were checked."""

    digest: str
    files: tuple[FileEntry, ...]
    pinned: PinnedSource
    lora: LoraFacts
    num_tensors: int
    warnings: tuple[str, ...]


def validate(
    uri: str, roots: Mapping[str, Path], base_model: str, model: ModelConfig, limits: Limits
) -> ValidatedAdapter:
    """Check the adapter at `uri` against the base model with id `base_model`. Blocks.

    Raises:
        InvalidArgument: the URI is malformed.
        SourceNotFound, SourceForbidden, SourceUnavailable: the files cannot be read, or changed while they were.
        AdapterInvalid, UnsupportedAdapter: metadata names the file, key or tensor.
    """
    source = open_source(uri, roots)
    names = adapter_files(source.list())
    with source.open(names.config) as file:
        raw_config, config_entry = _read_config(file, names.config, limits.config)
    config = parse_adapter_config(raw_config)
    with source.open(names.weights) as file:
        binding, weights_entry = _read_weights(file, names.weights, limits.weights, config, model)
    files = (config_entry, weights_entry)
    return ValidatedAdapter(
        digest=manifest_digest(files),
        files=files,
        pinned=source.pin(),
        lora=_facts(config, binding, model),
        num_tensors=binding.num_tensors,
        warnings=(*binding.warnings, *_base_model_warnings(config, base_model)),
    )


def _read_config(file: BinaryIO, name: str, limit: int) -> tuple[bytes, FileEntry]:
    stream = _Stream(file, name, limit)
    content = stream.read(stream.size)
    return content, stream.finish()


def _read_weights(
    file: BinaryIO, name: str, limit: int, config: LoraConfig, model: ModelConfig
) -> tuple[BindingPlan, FileEntry]:
    stream = _Stream(file, name, limit)
    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if length <= min(MAX_HEADER_BYTES, stream.size - len(head)):
        head += stream.read(length)
    tensors = read_header(lambda offset, count: head[offset : offset + count], stream.size, name)
    binding = plan(config, tensors, model)
    scan = FiniteScan(tensors)
    scan.feed(head)
    while chunk := stream.read(CHUNK_BYTES):
        scan.feed(chunk)
    entry = stream.finish()
    _check_does_something(binding, scan.nonzero, name)
    return binding, entry


def _check_does_something(binding: BindingPlan, nonzero: Set[str], file: str) -> None:
    """One of A and B is zero in a fresh adapter; were it so in every module, it would be the base model's twin."""
    if any(module.a in nonzero and module.b in nonzero for module in binding.modules):
        return
    kind = "lora_B" if all(module.b not in nonzero for module in binding.modules) else "lora_A"
    if kind == "lora_A" and any(module.a in nonzero for module in binding.modules):
        kind = "lora_A or lora_B"
    raise file_invalid(file, f"the adapter does nothing: every {kind} is all zero; was it saved before training?")


class _Stream:
    """A file read from its beginning to its end, hashing what passes."""

    def __init__(self, file: BinaryIO, name: str, limit: int) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()
        self._before = os.fstat(file.fileno())
        self._offset = 0
        self.size = self._before.st_size
        if self.size > limit:
            raise AdapterInvalid(
                f"{name} has {self.size} bytes; the limit is {limit}", metadata={"file": name, "limit": str(limit)}
            )

    def read(self, count: int) -> bytes:
        """The next `count` bytes, fewer only at the end that the file had when it was opened."""
        wanted = min(count, self.size - self._offset)
        parts: list[bytes] = []
        while wanted:
            try:
                part = self._file.read(wanted)
            except OSError as error:
                raise self._unavailable(f"cannot be read: {error.strerror}") from None
            if not part:
                raise self._unavailable("was truncated while it was read")
            parts.append(part)
            wanted -= len(part)
        content = b"".join(parts)
        self._hash.update(content)
        self._offset += len(content)
        return content

    def finish(self) -> FileEntry:
        """The file's entry in the manifest, if it is still the file that was opened."""
        after = os.fstat(self._file.fileno())
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise self._unavailable("changed while it was read")
        return FileEntry(self._name, self.size, self._hash.hexdigest())

    def _unavailable(self, problem: str) -> SourceUnavailable:
        return SourceUnavailable(f"{self._name} {problem}", metadata={"file": self._name})


def _facts(config: LoraConfig, binding: BindingPlan, model: ModelConfig) -> LoraFacts:
    used = {module.module for module in binding.modules}
    parameters = sum(module.rank * sum(linear_shape(model, module.module)) for module in binding.modules)
    return LoraFacts(
        rank=binding.rank,
        alpha=config.lora_alpha,
        target_modules=tuple(MODULES[module] for module in sorted(used)),
        use_rslora=config.use_rslora,
        num_modules=len(binding.modules),
        device_bytes=2 * parameters,
    )


def _base_model_warnings(config: LoraConfig, base_model: str) -> tuple[str, ...]:
    trained_on = config.base_model_name_or_path
    if not trained_on or _may_name(trained_on, base_model):
        return ()
    return (f"base_model_name_or_path says {trained_on[:200]!r}, not {base_model}",)


def _may_name(name_or_path: str, base_model: str) -> bool:
    """Whether a Hub id or a folder may be the base model of this id: the same but for who published or stored it."""
    last = name_or_path.rstrip("/").rpartition("/")[2].lower()
    return default_id(name_or_path) == base_model or last == base_model.rpartition("--")[2]
