"""Twenty-five adapters that must be refused, each for a reason of its own: what is done to the files of a good one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Tensors = dict[str, np.ndarray]


class Invalid(NamedTuple):
    """`spoil` changes a folder that holds a good adapter; then its registration ends with `reason`, naming `named`."""

    spoil: Callable[[Path], object]
    reason: str
    named: str


def _config(**changes: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return spoil


def _text(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / CONFIG).write_bytes(content)


def _tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def _with(value: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[Q0_A][0, 0] = value

    return change


def _renamed(old: str, new: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return spoil


def _zeros(tensors: Tensors) -> None:
    for name in tensors:
        if "lora_B" in name:
            tensors[name][:] = 0


def _outside(folder: Path) -> None:
    target = folder.parents[1] / "outside.safetensors"
    (folder / WEIGHTS).rename(target)
    (folder / WEIGHTS).symlink_to(target)


def _fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


INVALID: dict[str, Invalid] = {
    "no-such-folder": Invalid(shutil.rmtree, "SOURCE_NOT_FOUND", "no-such-folder"),
    "no-config": Invalid(lambda folder: (folder / CONFIG).unlink(), "ADAPTER_INVALID", CONFIG),
    "no-weights": Invalid(lambda folder: (folder / WEIGHTS).unlink(), "ADAPTER_INVALID", WEIGHTS),
    "pickle": Invalid(
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        "UNSUPPORTED_ADAPTER",
        "adapter_model.bin",
    ),
    "link-outside": Invalid(_outside, "SOURCE_FORBIDDEN", WEIGHTS),
    "fifo": Invalid(_fifo, "SOURCE_FORBIDDEN", WEIGHTS),
    "config-no-json": Invalid(_text(b'{"r": 8,'), "ADAPTER_INVALID", CONFIG),
    "config-a-list": Invalid(_text(b"[]"), "ADAPTER_INVALID", CONFIG),
    "config-twice": Invalid(_text(b'{"peft_type": "LORA", "r": 8, "r": 9}'), "ADAPTER_INVALID", "r"),
    "prefix-tuning": Invalid(_config(peft_type="PREFIX_TUNING"), "UNSUPPORTED_ADAPTER", "peft_type"),
    "unknown-key": Invalid(_config(frobnicate=3), "UNSUPPORTED_ADAPTER", "frobnicate"),
    "rank-of-another": Invalid(_config(r=7), "ADAPTER_INVALID", "lora_A"),
    "rank-zero": Invalid(_config(r=0), "ADAPTER_INVALID", "r"),
    "alpha-zero": Invalid(_config(lora_alpha=0), "ADAPTER_INVALID", "lora_alpha"),
    "promises-more": Invalid(_config(target_modules=["q_proj", "lm_head"]), "ADAPTER_INVALID|UNSUPPORTED_ADAPTER", ""),
    "truncated": Invalid(_bytes(lambda data: data[:-100]), "ADAPTER_INVALID", "truncated"),
    "empty": Invalid(_bytes(lambda _: b""), "ADAPTER_INVALID", WEIGHTS),
    "more-bytes": Invalid(_bytes(lambda data: data + b"\0"), "ADAPTER_INVALID", WEIGHTS),
    "endless-header": Invalid(_bytes(lambda data: b"\xff" * 8 + data[8:]), "ADAPTER_INVALID", "header"),
    "header-no-json": Invalid(_bytes(lambda data: data[:8] + b"!" + data[9:]), "ADAPTER_INVALID", WEIGHTS),
    "nan": Invalid(_tensors(_with(np.nan)), "ADAPTER_INVALID", Q0_A),
    "infinite": Invalid(_tensors(_with(-np.inf)), "ADAPTER_INVALID", Q0_A),
    "layer-too-many": Invalid(_tensors(_renamed("layers.1.", "layers.2.")), "ADAPTER_INVALID", "layers.2."),
    "half-a-module": Invalid(_tensors(lambda tensors: tensors.pop(Q0_A)), "ADAPTER_INVALID", "lora_B"),
    "does-nothing": Invalid(_tensors(_zeros), "ADAPTER_INVALID", "lora_B"),
}
