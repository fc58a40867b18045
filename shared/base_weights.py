"""The fingerprint of a base model that covers its weights, as far as can be had without reading all of them."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.adapter_format.header import TensorInfo, read_header_of
from shared.base_model import fingerprint, parse_config, tensor_shapes
from shared.errors import AdapterInvalid, InvalidArgument

SAMPLE_BYTES = 4096
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def fingerprint_with_weights(raw_config: Mapping[str, Any], folder: Path) -> str:
    """`sha256:HEX` over `shared.base_model.fingerprint` and a sample of every tensor of the checkpoint in `folder`.

    The sample is, ordered by name, a line of canonical JSON [name, dtype, shape] and the first and last 4 KiB of the
    data. It tells fine-tunes of one architecture apart; a base model is registered under the plain fingerprint, and
    this one is a second value that replicas compare. Files are read with pread, never mapped. Only tensors that the
    config asks for count, however they are spread over files.

    Raises:
        InvalidArgument: naming `model`: no safetensors files, a malformed one, or a tensor that is missing or of
            another shape than the config says.
    """
    expected = tensor_shapes(parse_config(raw_config))
    found = _locate(folder, expected)
    samples: dict[str, bytes] = {}
    for path in {path for path, _ in found.values()}:
        samples |= _samples(path, {name: info for name, (at, info) in found.items() if at == path})
    hasher = hashlib.sha256(fingerprint(raw_config).encode() + b"\n")
    for name in sorted(expected):
        info = found[name][1]
        hasher.update(json.dumps([name, info.dtype, info.shape], separators=(",", ":")).encode() + b"\n")
        hasher.update(samples[name])
    return f"sha256:{hasher.hexdigest()}"


def dummy_fingerprint(raw_config: Mapping[str, Any], seed: int) -> str:
    """`sha256:HEX` that stands for random weights of this shape and seed; no checkpoint has it."""
    return f"sha256:{hashlib.sha256(f'{fingerprint(raw_config)} dummy {seed}'.encode()).hexdigest()}"


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, or the single one. InvalidArgument if none."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise InvalidArgument.of("model", f"there is neither {SINGLE} nor {INDEX} in {folder.name}")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidArgument.of("model", f"{INDEX} is malformed") from None
    for name in names:
        if not isinstance(name, str) or "/" in name or not (folder / name).is_file():
            raise InvalidArgument.of("model", f"{INDEX} names {name!r:.100}, which is not a file beside it")
    return [folder / name for name in names]


def _locate(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Path, TensorInfo]]:
    """File and header entry of every expected tensor, its shape checked."""
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for path in checkpoint_files(folder):
        try:
            header = read_header_of(path)
        except AdapterInvalid as error:  # the reader's usual files are adapters
            raise InvalidArgument.of("model", error.message) from None
        found.update({name: (path, info) for name, info in header.items() if name in expected})
    for name, shape in expected.items():
        if name not in found:
            raise InvalidArgument.of("model", f"tensor {name} is missing from the checkpoint")
        path, info = found[name]
        if info.shape != shape:
            shapes = f"{list(info.shape)} in {path.name}, {list(shape)} by config.json"
            raise InvalidArgument.of("model", f"tensor {name} has shape {shapes}")
    return found


def _samples(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, bytes]:
    """The first and last SAMPLE_BYTES of each tensor; all of it, once, where these overlap."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return {name: _sample(lambda at, size: os.pread(descriptor, size, at), info) for name, info in tensors.items()}
    finally:
        os.close(descriptor)


def _sample(read: Callable[[int, int], bytes], info: TensorInfo) -> bytes:
    if info.end - info.begin <= 2 * SAMPLE_BYTES:
        return read(info.begin, info.end - info.begin)
    return read(info.begin, SAMPLE_BYTES) + read(info.end - SAMPLE_BYTES, SAMPLE_BYTES)
