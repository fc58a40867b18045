"""Adapters bound and packed in this process, as the adapter process would: no services, no RPC, no engine."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.packer import open_adapter
from inference_service.model.loader import load_config
from inference_service.types import Acquired
from shared.adapter_format.files import adapter_files, named_folder
from shared.digest import FileEntry, manifest_digest

ARENA_BYTES = 64 << 20


class Packed(NamedTuple):
    """The base model in `folder`, and adapters in a host arena by their digests."""

    folder: Path
    host: torch.Tensor
    acquired: dict[str, Acquired]


def empty(base: Path, nbytes: int = ARENA_BYTES) -> Packed:
    """An arena of `nbytes` without adapters."""
    return Packed(base, torch.zeros(nbytes, dtype=torch.uint8), {})


def pack(packed: Packed, folder: Path, dtype: str = "float32") -> str:
    """The digest of the adapter in `folder`, once it is in the arena in `dtype`. Raises as `open_adapter`."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    below = named_folder(names, [path.name for path in folder.iterdir() if path.is_dir()])
    folder = folder / below if below else folder
    entries = manifest(folder)
    _, model = load_config(packed.folder)
    begin = max((other.host_offset + other.layout.nbytes for other in packed.acquired.values()), default=0)
    begin = -(-begin // 4096) * 4096
    with (
        open_adapter(folder, entries, model, dtype, BaseTensors(packed.folder, model, dtype)) as adapter,
        ThreadPoolExecutor(1) as workers,
    ):
        adapter.fill(memoryview(packed.host.numpy())[begin : begin + adapter.layout.nbytes], workers)
        digest = manifest_digest(entries)
        packed.acquired[digest] = Acquired(digest, begin, adapter.layout)
    return digest


def manifest(folder: Path) -> list[FileEntry]:
    """Of the files that make an adapter."""
    return [
        FileEntry(name, (folder / name).stat().st_size, hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for name in adapter_files([path.name for path in folder.iterdir()])
    ]
