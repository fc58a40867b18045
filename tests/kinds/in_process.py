"""Adapters bound, packed and run by the engine of this process: no services, no RPC."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.packer import open_adapter
from inference_service.model.loader import load_config
from inference_service.requests import activation_start
from inference_service.types import Acquired, GenerateSpec, Sampling, Stop
from shared.adapter_format.files import adapter_files, named_folder
from shared.digest import FileEntry, manifest_digest
from tests.inference_service.engine.tiny_engine import build_engine, run

ARENA_BYTES = 64 << 20


class Packed(NamedTuple):
    """The base model in `folder`, and adapters in a host arena by their digests."""

    folder: Path
    host: torch.Tensor
    acquired: dict[str, Acquired]


class Asked(NamedTuple):
    """A prompt for an adapter. `digest`: None for the base model."""

    digest: str | None
    prompt: list[int]


def empty(base: Path) -> Packed:
    return Packed(base, torch.zeros(ARENA_BYTES, dtype=torch.uint8), {})


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


def prompt_logprobs(packed: Packed, asked: list[Asked]) -> list[list[float]]:
    """Of each prompt's tokens from the second on, and of one greedy token behind it, all in one batch."""
    engine = build_engine(
        packed, budget=1024, num_seqs=64, slots=64, adapter_bytes=ARENA_BYTES, kv_tokens=8192, prefix_caching=False
    )
    specs = [_spec(number, one, packed) for number, one in enumerate(asked)]
    answers, scores = run(engine, specs)
    return [
        [entry.logprob for entry in scores.get(spec.request_id, ())] + answers[spec.request_id, 0][1] for spec in specs
    ]


def _spec(number: int, asked: Asked, packed: Packed) -> GenerateSpec:
    layout = packed.acquired[asked.digest].layout if asked.digest else None
    start = activation_start(asked.prompt, layout.activation) if layout else 0
    return GenerateSpec(
        f"{number}", asked.prompt, Sampling(temperature=0.0), Stop(1, ignore_eos=True),
        None if start is None else asked.digest, logprobs=0, prompt_logprobs=0, adapter_start=start or 0,
        extra_vocab=layout.extra_vocab if layout else 0,
    )  # fmt: skip
