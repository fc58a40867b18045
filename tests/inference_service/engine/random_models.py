"""Models of any family and shape with random adapters of given ranks, for the tests on a GPU."""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from inference_service.adapters.layout import plan_layout
from inference_service.model.loader import load_config
from inference_service.types import Acquired, BlobLayout
from shared.adapter_format.binding import BindingPlan, ModuleBinding
from shared.base_model import MODULES
from tests.bench.shapes import SHAPES
from tests.inference_service.model.tiny_models import build

NUM_MODULES = len(MODULES)


class RandomModel(NamedTuple):
    """As `tiny_model.Tiny`, without an oracle."""

    folder: Path
    host: torch.Tensor
    acquired: dict[str, Acquired]

    @property
    def digests(self) -> list[str]:
        return list(self.acquired)


def tiny_family(folder: Path, family: str, ranks: tuple[int, ...]) -> RandomModel:
    """A saved float32 model of `family`."""
    build(family).save_pretrained(folder)
    return RandomModel(folder, *random_adapters(folder, ranks, "float32", 0.2))


def two_layers_of_8b(folder: Path, ranks: tuple[int, ...], dtype: str) -> RandomModel:
    """The shape of Llama-3.1-8B with two layers, without weights: load it as dummy."""
    (folder / "config.json").write_text(json.dumps({**SHAPES["llama-3.1-8b"], "num_hidden_layers": 2}))
    return RandomModel(folder, *random_adapters(folder, ranks, dtype, 0.02))


def random_adapters(
    folder: Path, ranks: tuple[int, ...], dtype: str, deviation: float
) -> tuple[torch.Tensor, dict[str, Acquired]]:
    """Adapters on every linear, named by number and rank, packed one after the other in a host arena."""
    _, model = load_config(folder)
    acquired: dict[str, Acquired] = {}
    offset = 0
    for number, rank in enumerate(ranks):
        modules = tuple(
            ModuleBinding(layer, module, "", rank, 0.5, "", "")
            for layer in range(model.num_layers)
            for module in range(NUM_MODULES)
        )
        layout = plan_layout(BindingPlan(modules, rank, 2 * len(modules), ()), model, dtype)
        acquired[f"sha256:{number}-r{rank}"] = Acquired(f"sha256:{number}-r{rank}", offset, layout)
        offset += -(-layout.nbytes // 4096) * 4096
    values = torch.empty(offset // getattr(torch, dtype).itemsize, dtype=torch.float32)
    values.normal_(0.0, deviation, generator=torch.Generator().manual_seed(1))
    return values.to(getattr(torch, dtype)).view(torch.uint8), acquired


def blob_of(model: RandomModel, digest: str) -> tuple[torch.Tensor, BlobLayout]:
    """An adapter's bytes in the host arena, and what they hold."""
    offset, layout = model.acquired[digest].host_offset, model.acquired[digest].layout
    return model.host[offset : offset + layout.nbytes], layout
