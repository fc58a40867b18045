"""A base projection with adapters: the decoder does not know that LoRA exists."""

from itertools import product

import torch
from torch import Tensor, nn

from inference_service.lora.arena import Arena
from inference_service.lora.batch import LoraBatch
from kernels import reference
from kernels.beside import product_and_delta
from kernels.lora import add_lora
from kernels.table import Chunks, Group
from shared.base_model import ModelConfig, linear_shape

WIDENED_ROWS = 1024  # of half precision, of which a float32 copy is made at a time: a GPU has planned for no more

# A layer's packed projections, and the modules in each as indices into `shared.base_model.MODULES`.
PROJECTIONS = {
    "self_attn.qkv_proj": (0, 1, 2),
    "self_attn.o_proj": (3,),
    "mlp.gate_up_proj": (4, 5),
    "mlp.down_proj": (6,),
}


def group_of(config: ModelConfig, modules: tuple[int, ...]) -> Group:
    """The group of `modules`: which columns of the packed output each one writes."""
    shapes = [linear_shape(config, module) for module in modules]
    columns = [0]
    for out_features, _ in shapes:
        columns.append(columns[-1] + out_features)
    return Group(modules, tuple(columns), shapes[0][1])


class LoraLinear(nn.Module):
    """Wraps one packed projection of one layer and adds what each row's adapter contributes."""

    def __init__(self, base: nn.Module, arena: Arena, layer: int, group: Group) -> None:
        super().__init__()
        self.base = base
        self.arena = arena
        self.table = arena.table
        self.sides = arena.sides
        self.layer = layer
        self.group = group

    def forward(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """x `[rows, in]` → `[rows, columns[-1]]`; the base projection alone where `lora` is None."""
        y: Tensor = self.base(x, None)
        if lora is None:
            return y
        if lora.rich:
            return self._with_extras(y, x, lora)
        add_lora(y, x, self.table, self.layer, self.group, lora.rows)
        return y

    def _with_extras(self, y: Tensor, x: Tensor, lora: LoraBatch) -> Tensor:
        """As `forward`, and gains and offsets, all in float32 with one rounding. PyTorch's products on any device."""
        if y.dtype == torch.float32:
            self._add_with_extras(y, x, lora)
            return y
        for start in range(0, y.shape[0], WIDENED_ROWS):
            end = min(start + WIDENED_ROWS, y.shape[0])
            total = y[start:end].float()
            self._add_with_extras(total, x[start:end].float(), lora.part(start, end))
            y[start:end] = total
        return y

    def _add_with_extras(self, y: Tensor, x: Tensor, lora: LoraBatch) -> None:
        """On `y` and `x` in float32, in place."""
        reference.add_lora(y, x, self.table, self.layer, self.group, lora.segments)
        columns = zip(self.group.modules, self.group.columns[:-1], self.group.columns[1:], strict=True)
        for (module, begin, stop), (slot, start, end) in product(columns, lora.rich):
            affine = self.arena.extras[slot].affine.get((self.layer, module))
            if affine is not None:
                affine.apply(y[start:end, begin:stop])

    def project(self, x: Tensor, chunks: Chunks | None) -> tuple[Tensor, Tensor | None]:
        """The base output, and in float32 what the adapters add, for the kernel that reads both; None: nothing more."""
        if chunks is None:
            y: Tensor = self.base(x, None)
            return y, None
        return product_and_delta(self.base, x, self.table, self.layer, self.group, chunks, self.sides)


def install(decoder: nn.Module, config: ModelConfig, arena: Arena) -> None:
    """Wrap the four projections of every layer of `decoder` (`layers.N.self_attn.qkv_proj` …), in place."""
    groups = {path: group_of(config, modules) for path, modules in PROJECTIONS.items()}
    for layer in range(config.num_layers):
        for path, group in groups.items():
            parent, name = f"layers.{layer}.{path}".rsplit(".", 1)
            owner = decoder.get_submodule(parent)
            setattr(owner, name, LoraLinear(owner.get_submodule(name), arena, layer, group))
