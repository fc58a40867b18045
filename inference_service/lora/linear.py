"""A base projection with adapters: the decoder does not know that LoRA exists."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import torch
from torch import Tensor, nn

from inference_service.lora.arena import Arena
from inference_service.lora.batch import LoraBatch
from kernels.lora import Addend, add_lora, shrink
from kernels.table import Chunks, Group
from shared.base_model import ModelConfig, linear_shape

SIDE_ROWS = 16  # rows a chunk up to which a batch is decoding

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
        self.table = arena.table
        self.side = arena.side
        self.layer = layer
        self.group = group

    def forward(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """x `[rows, in]` → `[rows, columns[-1]]`; the base projection alone where `lora` is None."""
        y: Tensor = self.base(x, None)
        if lora is not None:
            add_lora(y, x, self.table, self.layer, self.group, lora)
        return y

    def project(self, x: Tensor, chunks: Chunks | None) -> tuple[Tensor, Addend | None]:
        """The base output on a GPU, and what the adapters add, for the kernel that reads both.

        The shrink needs only `x`: for few rows, where the base product waits for memory, it runs beside it.
        """
        if chunks is None:
            y: Tensor = self.base(x, None)
            return y, None
        if self.side is None or chunks.rows_per_chunk > SIDE_ROWS:
            y = self.base(x, None)
            v = shrink(x, self.table, self.layer, self.group, chunks)
            return y, Addend(v, self.table, self.layer, self.group, chunks)
        main = torch.cuda.current_stream()
        before = main.record_event()
        y = self.base(x, None)  # first: a shrink that holds registers on every multiprocessor would delay it
        self.side.wait_event(before)
        with torch.cuda.stream(self.side):
            v = shrink(x, self.table, self.layer, self.group, chunks)
        main.wait_stream(self.side)
        return y, Addend(v, self.table, self.layer, self.group, chunks)


def install(decoder: nn.Module, config: ModelConfig, arena: Arena) -> None:
    """Wrap the four projections of every layer of `decoder` (`layers.N.self_attn.qkv_proj` …), in place."""
    groups = {path: group_of(config, modules) for path, modules in PROJECTIONS.items()}
    for layer in range(config.num_layers):
        for path, group in groups.items():
            parent, name = f"layers.{layer}.{path}".rsplit(".", 1)
            owner = decoder.get_submodule(parent)
            setattr(owner, name, LoraLinear(owner.get_submodule(name), arena, layer, group))
