"""The gated MLP's activation over the packed output of gate and up: the door and the reference."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.reference import rounded_sum


def silu_mul(gate_up: Tensor, delta: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Semantics: out = silu(gate) · up in float32, rounded once.

    With a delta, gate and up are first their sums with it, rounded to their dtype; `gate_up` stays as it is.

    Args:
        gate_up: `[tokens, 2 · intermediate]`, gate before up, last dimension contiguous.
        delta: `[tokens, 2 · intermediate]` float32, contiguous (`kernels.beside`), or None.
        out: `[tokens, intermediate]` in the same dtype, or None to allocate.
    """
    if gate_up.is_cuda:
        from kernels import silu_mul_triton

        return silu_mul_triton.silu_mul(gate_up, delta, out)
    result = silu_mul_reference(gate_up, delta)
    return result if out is None else out.copy_(result)


def silu_mul_reference(gate_up: Tensor, delta: Tensor | None = None) -> Tensor:
    """See `silu_mul`."""
    gate_up = rounded_sum(gate_up, delta)
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (silu(gate) * up).to(gate_up.dtype)
