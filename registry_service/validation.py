"""Reads an adapter's files once: hashes every byte, checks every tensor against the base model, and plans the binding.

All of it blocks and belongs in a thread. Nothing is mapped into memory, so a file that shrinks meanwhile is an error
and not a crash.
"""

import hashlib
import threading
from collections.abc import Set
from typing import Any, NamedTuple

from shared.adapter_format.binding import BindingPlan, plan
from shared.adapter_format.config import LoraConfig, parse_adapter_config
from shared.adapter_format.files import CONFIG, adapter_files, named_folder
from shared.adapter_format.finite import FiniteScan
from shared.adapter_format.header import MAX_HEADER_BYTES, read_header
from shared.adapter_format.reasons import file_invalid
from shared.adapter_format.served import check_served
from shared.adapter_format.summary import ModuleSummary, summarise
from shared.adapter_format.texts import MAX_BYTES, text_files, text_warnings
from shared.base_model import ModelConfig, default_id
from shared.digest import FileEntry, manifest_digest
from shared.errors import AdapterInvalid, SourceUnavailable
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import FolderedSource, PinnedSource, Source, SourceFile, open_source

CHUNK_BYTES = 1 << 20
_OF_PAIRS = frozenset({"lora", "embedding", "lm_head", "block_diagonal", "activated"})


class Limits(NamedTuple):
    """Largest files that are read, in bytes."""

    config: int
    weights: int


class Origin(NamedTuple):
    """What the caller names as an adapter's source, and the namespace that reads it."""

    uri: str
    credential_ref: str
    namespace: str


class LoraFacts(NamedTuple):
    """What the adapter does to its base model. `device_bytes` counts 2 bytes a parameter, and is at most that."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool
    use_dora: bool
    kinds: tuple[str, ...]
    num_modules: int
    device_bytes: int
    modules: tuple[ModuleSummary, ...]

    def record(self) -> dict[str, Any]:
        """As JSON, with the fields of the message of the same meaning."""
        modules = [{**module._asdict(), "kinds": list(module.kinds)} for module in self.modules]
        lists = {"target_modules": list(self.target_modules), "kinds": list(self.kinds), "modules": modules}
        return {**self._asdict(), **lists}


class ValidatedAdapter(NamedTuple):
    """An adapter that fits its base model, and the digest of exactly the bytes that were checked."""

    digest: str
    files: tuple[FileEntry, ...]
    pinned: PinnedSource
    lora: LoraFacts
    num_tensors: int
    warnings: tuple[str, ...]


def validate(
    origin: Origin,
    policy: SourcePolicy,
    stopping: threading.Event,
    base_model: str,
    model: ModelConfig,
    limits: Limits,
) -> ValidatedAdapter:
    """Check the adapter at `origin` against the base model with id `base_model`. Blocks; `stopping` ends it early.

    A remote file that is refused for its size or header is not downloaded.

    Raises:
        InvalidArgument: the URI is malformed.
        CredentialNotAllowed: the namespace may not use the credential for it.
        SourceNotFound, SourceForbidden, SourceUnavailable: the files cannot be read, or changed while they were.
        AdapterInvalid, UnsupportedAdapter: metadata names the file, key or tensor.
    """
    source, listing, above = _adapter_folder(origin, policy, stopping)
    names = adapter_files(listing)
    with source.open(names.config) as file:
        raw_config, config_entry = _read_config(file, names.config, limits.config)
    config = parse_adapter_config(raw_config)
    texts = tuple(_read_text(source, name) for name in text_files(listing, names.config))
    with source.open(names.weights) as file:
        binding, weights_entry = _read_weights(file, names.weights, limits.weights, config, model)
    files = (config_entry, weights_entry, *texts)
    return ValidatedAdapter(
        digest=manifest_digest(files),
        files=files,
        pinned=source.pin(),
        lora=_facts(config, binding, model),
        num_tensors=binding.num_tensors,
        warnings=(
            *binding.warnings,
            *_base_model_warnings(config, base_model),
            *text_warnings(listing, above, binding.extra_vocab),
        ),
    )


class _Folder(NamedTuple):
    """The folder with the adapter's files. `above`: what lies beside it, where another one was named."""

    source: Source
    names: list[str]
    above: list[str]


def _adapter_folder(origin: Origin, policy: SourcePolicy, stopping: threading.Event) -> _Folder:
    """`origin`, or the folder in it that has the adapter's name."""
    asked = PinnedSource(origin.uri, credential_ref=origin.credential_ref)
    source = open_source(asked, origin.namespace, policy, stopping)
    listing = source.list()
    if CONFIG in listing or not isinstance(source, FolderedSource):
        return _Folder(source, listing, [])
    folder = named_folder(listing, source.folders())
    if folder is None:
        return _Folder(source, listing, [])
    below = asked._replace(uri=f"{asked.uri.rstrip('/')}/{folder}")
    source = open_source(below, origin.namespace, policy, stopping)
    return _Folder(source, source.list(), listing)


def _read_config(file: SourceFile, name: str, limit: int) -> tuple[bytes, FileEntry]:
    stream = _Stream(file, name, limit)
    content = stream.read(stream.size)
    return content, stream.finish()


def _read_text(source: Source, name: str) -> FileEntry:
    """A tokenizer or chat template. It is a tenant's code: it is run on replicas only, where it can be ended."""
    with source.open(name) as file:
        stream = _Stream(file, name, MAX_BYTES[name.rpartition("/")[2]])
        while stream.read(CHUNK_BYTES):
            pass
        return stream.finish()


def _read_weights(
    file: SourceFile, name: str, limit: int, config: LoraConfig, model: ModelConfig
) -> tuple[BindingPlan, FileEntry]:
    stream = _Stream(file, name, limit)
    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if length <= min(MAX_HEADER_BYTES, stream.size - len(head)):
        head += stream.read(length)
    tensors = read_header(lambda offset, count: head[offset : offset + count], stream.size, name)
    binding = plan(config, tensors, model)
    check_served(binding)
    scan = FiniteScan(tensors)
    scan.feed(head)
    while chunk := stream.read(CHUNK_BYTES):
        scan.feed(chunk)
    entry = stream.finish()
    _check_does_something(binding, scan.nonzero, name)
    return binding, entry


def _check_does_something(binding: BindingPlan, nonzero: Set[str], file: str) -> None:
    """One of A and B is zero in a fresh adapter; were it so in every module, it would be the base model's twin."""
    if set(binding.kinds) - _OF_PAIRS:
        return  # rows, biases, norms and magnitudes act without A and B
    sides = [side for side in (binding.embed, binding.head) if side is not None]
    pairs = [(pair.a, pair.b) for pair in (*binding.modules, *sides) if pair.a is not None and pair.b is not None]
    if any(a in nonzero and b in nonzero for a, b in pairs):
        return
    kind = "lora_B" if all(b not in nonzero for _, b in pairs) else "lora_A"
    if kind == "lora_A" and any(a in nonzero for a, _ in pairs):
        kind = "lora_A or lora_B"
    raise file_invalid(file, f"the adapter does nothing: every {kind} is all zero", "save it after training")


class _Stream:
    """A file read from its beginning to its end, hashing what passes."""

    def __init__(self, file: SourceFile, name: str, limit: int) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()
        self._offset = 0
        self.size = file.size
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
        if not self._file.is_unchanged():
            raise self._unavailable("changed while it was read")
        return FileEntry(self._name, self.size, self._hash.hexdigest())

    def _unavailable(self, problem: str) -> SourceUnavailable:
        return SourceUnavailable(f"{self._name} {problem}", metadata={"file": self._name})


def _facts(config: LoraConfig, binding: BindingPlan, model: ModelConfig) -> LoraFacts:
    modules = summarise(binding, model)
    adapted = [module for module in modules if module.rank]
    sides = [side for side in (binding.embed, binding.head) if side is not None and side.a is not None]
    return LoraFacts(
        rank=max((module.rank for module in adapted), default=0),
        alpha=config.lora_alpha,
        target_modules=tuple(dict.fromkeys(module.module for module in adapted)),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        kinds=binding.kinds,
        num_modules=len(binding.modules) + len(sides),
        device_bytes=sum(module.device_bytes for module in modules),
        modules=modules,
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
