"""What is done to the folder of an adapter after PEFT saved it. Each returns the folder that is registered."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Edit = Callable[[Path], Path]


def saved_as(dtype: torch.dtype) -> Edit:
    """Its tensors in another dtype."""
    return every_tensor(lambda _, tensor: tensor.to(dtype))


def every_tensor(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Edit:
    """`change` makes each of them, by its name, another."""
    return _tensors(lambda tensors: {name: change(name, tensor) for name, tensor in tensors.items()})


def renamed(old: str, new: str) -> Edit:
    """Names that begin with `old` begin with `new`."""
    return _tensors(
        lambda tensors: {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in tensors.items()
        }
    )


def in_a_folder_below(folder: Path) -> Path:
    """Where PEFT saves an adapter that is not called `default`."""
    moved = folder.with_name(f"{folder.name} below")
    shutil.move(folder, moved / "trained")
    return moved


def changed(**keys: Any) -> Edit:
    """Other values in adapter_config.json."""

    def edit(folder: Path) -> Path:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | keys))
        return folder

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """`change` alters the tensors by name in place."""

    def edit(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        change(found)
        return found

    return _tensors(edit)


def _tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Edit:
    def edit(folder: Path) -> Path:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})
        return folder

    return edit
