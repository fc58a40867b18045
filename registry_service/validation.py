"""Reads an adapter's files once: hashes every byte, checks every tensor against the base model, and plans the binding.

All of it blocks and belongs in a thread. Nothing is mapped into memory, so a file that shrinks meanwhile is an error
and not a crash.
"""

import threading
from collections.abc import Set
from typing import Any, NamedTuple

from registry_service import file_stream
from registry_service.adapter_folder import Origin, adapter_folder
from registry_service.file_stream import FileStream
from registry_service.text_files import read_texts
from shared.adapter_format.binding import BindingPlan, plan
from shared.adapter_format.config import LoraConfig, parse_adapter_config
from shared.adapter_format.files import adapter_files
from shared.adapter_format.finite import FiniteScan
from shared.adapter_format.header import MAX_HEADER_BYTES, read_header
from shared.adapter_format.reasons import file_invalid
from shared.adapter_format.served import check_served
from shared.adapter_format.summary import ModuleSummary, summarise
from shared.adapter_format.texts import check_texts_are_files, text_files, text_warnings
from shared.base_model import ModelConfig, default_id
from shared.digest import FileEntry, manifest_digest
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import FolderedSource, PinnedSource, SourceFile

_OF_PAIRS = frozenset({"lora", "embedding", "lm_head", "block_diagonal", "activated"})


class Limits(NamedTuple):
    """Largest files that are read, in bytes."""

    config: int
    weights: int


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
    source, listing, above = adapter_folder(origin, policy, stopping)
    folders = source.folders if isinstance(source, FolderedSource) else tuple
    names = adapter_files(listing, folders)
    check_texts_are_files(listing, folders)
    with source.open(names.config) as file:
        raw_config, config_entry = _read_config(file, names.config, limits.config)
    config = parse_adapter_config(raw_config)
    texts = read_texts(source, text_files(listing, names.config), model)
    with source.open(names.weights) as file:
        binding, weights_entry = _read_weights(file, names.weights, limits.weights, config, model)
    files = (config_entry, weights_entry, *texts.files)
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
            *texts.facts.warnings(model.vocab_size + binding.extra_vocab),
        ),
    )


def _read_config(file: SourceFile, name: str, limit: int) -> tuple[bytes, FileEntry]:
    stream = FileStream(file, name, limit)
    content = stream.read(stream.size)
    return content, stream.finish()


def _read_weights(
    file: SourceFile, name: str, limit: int, config: LoraConfig, model: ModelConfig
) -> tuple[BindingPlan, FileEntry]:
    stream = FileStream(file, name, limit)
    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if length <= min(MAX_HEADER_BYTES, stream.size - len(head)):
        head += stream.read(length)
    tensors = read_header(lambda offset, count: head[offset : offset + count], stream.size, name)
    binding = plan(config, tensors, model)
    check_served(binding)
    scan = FiniteScan(tensors)
    scan.feed(head)
    while chunk := stream.read(file_stream.CHUNK_BYTES):
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
