"""RMSNorm (arXiv:1910.07467), alone or after a residual addition: the doors and the references.

Rounds where transformers' `LlamaRMSNorm` does: the norm in float32, a cast to the model's dtype, then the weight.
"""

import torch
from torch import Tensor

from kernels.reference import rounded_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Semantics: out = weight · round(x / √(mean(x²) + eps)), over the last dimension.

    Args:
        x: `[rows, size]`, last dimension contiguous.
        weight: `[size]`.
        eps: Added to the mean square.
        out: `[rows, size]` in x's dtype, or None to allocate.
    """
    if x.is_cuda:
        from kernels import rms_norm_triton

        return rms_norm_triton.rms_norm(x, weight, eps, out)
    return _given(out, rms_norm_reference(x, weight, eps))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Semantics: residual += x, rounded to its dtype, in place; out = the RMSNorm of residual.

    With a delta, x is first its sum with it, rounded to its dtype; what x holds stays as it is.

    Args:
        x: `[rows, size]`, last dimension contiguous.
        residual: `[rows, size]` in x's dtype, last dimension contiguous, changed in place.
        weight: `[size]`.
        eps: Added to the mean square.
        delta: `[rows, size]` float32, contiguous (`kernels.beside`), or None.
        out: `[rows, size]` in x's dtype, or None to allocate. May be `x`.
    """
    if x.is_cuda:
        from kernels import rms_norm_triton

        return rms_norm_triton.add_rms_norm(x, residual, weight, eps, delta, out)
    return _given(out, add_rms_norm_reference(x, residual, weight, eps, delta))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
) -> Tensor:
    """See `add_rms_norm`."""
    residual.add_(rounded_sum(x, delta))
    return rms_norm_reference(residual, weight, eps)


def _given(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
