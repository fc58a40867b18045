"""Adapter folders of any number with random weights, as cheap on disk as one."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.base_model import MODULES, ModelConfig, linear_shape, module_path


def write_adapters(store: Path, names: Sequence[str], model: ModelConfig, rank: int, modules: Sequence[str]) -> None:
    """A folder in `store` for each name: rank `rank` on `modules` of every layer, in bfloat16.

    All share one file of weights; their alphas differ, hence their digests.
    """
    store.mkdir(parents=True, exist_ok=True)
    weights = store / f".weights-{rank}-{len(modules)}.safetensors"
    if not weights.exists():
        save_file(_tensors(model, rank, modules), weights)
    for number, name in enumerate(names):
        folder = store / name
        folder.mkdir()
        os.link(weights, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 1 + number / 1000,
            "target_modules": list(modules),
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config))


def _tensors(model: ModelConfig, rank: int, modules: Sequence[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(model.num_layers):
        for name in modules:
            module = MODULES.index(name)
            rows, columns = linear_shape(model, module)
            prefix = f"base_model.model.{module_path(layer, module)}"
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                values = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
                tensors[f"{prefix}.{part}.weight"] = values.to(torch.bfloat16)
    return tensors
