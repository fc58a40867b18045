"""The layers a decoder is made of, for inference only: parameters are frozen and start uninitialised."""

import torch
from torch import Tensor, nn
from torch.nn import functional

_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def frozen(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [rows, in] @ `weight` [out, in] transposed + `bias` [out], in x's dtype.

    In float32 on a CPU this asks oneDNN, where PyTorch would ask MKL: on two AMD cores oneDNN needs half the time
    for 1 to 16 rows, reading the same plain weight.
    """
    if _HAS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu":
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


class Linear(nn.Module):
    """y = x Wᵀ + b. Takes the step's LoRA metadata, and ignores it, so that an adapter-aware layer can replace it."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = frozen(out_features, in_features, device=device, dtype=dtype)
        self.bias = frozen(out_features, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor, lora: object | None = None) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of `weight` [vocab, hidden]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, token_ids: Tensor, lora: object | None = None) -> Tensor:
        return functional.embedding(token_ids, self.weight)


class Head(nn.Module):
    """Scores of every token of `weight` [vocab, hidden], in float32."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, lora: object | None = None) -> Tensor:
        return linear(hidden, self.weight).float()


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(size, device=device, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, lora: object | None = None) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up packed as one projection [2 · intermediate, hidden]."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj: nn.Module = Linear(hidden, 2 * intermediate, bias, device=device, dtype=dtype)
        self.down_proj: nn.Module = Linear(intermediate, hidden, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, lora: object | None) -> Tensor:
        gate, up = self.gate_up_proj(x, lora).chunk(2, -1)
        y: Tensor = self.down_proj(functional.silu(gate).mul_(up), lora)
        return y
