"""Packed blobs with random weights, as the adapter process would write them into the host arena."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from inference_service.types import BlobLayout, ChunkLayout, ModuleLayout

Shapes = Sequence[tuple[int, int]]  # (out, in) by module


class Blob:
    """Its layout, its bytes, and A `[rank, in]`, B `[out, rank]` and scale by (layer, module)."""

    def __init__(
        self, ranks: Mapping[tuple[int, int], int], shapes: Shapes, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a: dict[tuple[int, int], Tensor] = {}
        self.b: dict[tuple[int, int], Tensor] = {}
        self.scale: dict[tuple[int, int], float] = {}
        chunks: list[ChunkLayout] = []
        parts: list[Tensor] = []
        end = 0
        for layer in sorted({layer for layer, _ in ranks}):
            begin, modules = end, []
            for group in ((0, 1, 2), (3,), (4, 5), (6,)):
                present = [module for module in group if (layer, module) in ranks]
                offsets: dict[tuple[str, int], int] = {}
                for name in "ab":
                    for module in present:
                        rank, (out, in_features) = ranks[layer, module], shapes[module]
                        shape = (rank, in_features) if name == "a" else (rank, out)
                        values = torch.randn(shape, generator=generator).div(rank**0.5).to(dtype)
                        (self.a if name == "a" else self.b)[layer, module] = values if name == "a" else values.t()
                        data = values.contiguous().view(torch.uint8).flatten()
                        data = torch.cat([data, data.new_zeros(-data.numel() % 16)])
                        offsets[name, module] = end - begin
                        parts.append(data)
                        end += data.numel()
                for module in present:
                    self.scale[layer, module] = 0.5 + module / 4
                    modules.append(
                        ModuleLayout(
                            module, ranks[layer, module], self.scale[layer, module],
                            offsets["a", module], offsets["b", module],
                        )
                    )  # fmt: skip
            chunks.append(ChunkLayout(layer, begin, end - begin, tuple(modules)))
        self.bytes = torch.cat(parts)
        name = str(dtype).removeprefix("torch.")
        self.layout = BlobLayout(end, max(ranks.values()), name, tuple(chunks))

    def delta(self, x: Tensor, layer: int, module: int) -> Tensor:
        """scale · x Aᵀ Bᵀ in float64; zero where the adapter has no such module."""
        key = layer, module
        return self.scale[key] * (x.double() @ self.a[key].double().t() @ self.b[key].double().t())
