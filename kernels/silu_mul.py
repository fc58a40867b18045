"""The gated MLP's activation over the packed output of gate and up: the door and the reference."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.table import Addend


def silu_mul(gate_up: Tensor, addend: Addend | None = None, out: Tensor | None = None) -> Tensor:
    """Semantics: out = silu(gate) · up in float32, rounded once.

    With an addend, gate and up are what `kernels.lora.add` would make of them, rounded to their dtype as it does; it
    runs on a GPU only, and what `gate_up` holds afterwards is undefined.

    Args:
        gate_up: `[tokens, 2 · intermediate]`, gate before up, last dimension contiguous.
        addend: What gate and up still lack, or None. Its chunks cover all tokens.
        out: `[tokens, intermediate]` in the same dtype, or None to allocate.
    """
    if addend is not None:
        from kernels import silu_mul_lora_triton

        return silu_mul_lora_triton.silu_mul(gate_up, addend, out)
    if gate_up.is_cuda:
        from kernels import silu_mul_triton

        return silu_mul_triton.silu_mul(gate_up, out)
    result = silu_mul_reference(gate_up)
    return result if out is None else out.copy_(result)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """See `silu_mul`."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (silu(gate) * up).to(gate_up.dtype)
