# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""silu(gate) · up on a GPU: one program for each row and block of columns. Semantics: `kernels.silu_mul`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # with four warps, one 16-byte load a thread from either half


def silu_mul(gate_up: Tensor, delta: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See `kernels.silu_mul.silu_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[rows, triton.cdiv(size, BLOCK)](
        gate_up, gate_up if delta is None else delta, out, gate_up.stride(0), out.stride(0), size,
        DELTA=delta is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul(gate_up, delta, out, stride_in, stride_out, size, DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_up += row * stride_in
    gate = tl.load(gate_up + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + columns, mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        dtype: tl.constexpr = gate_up.dtype.element_ty
        delta += row * 2 * size + columns
        gate = (gate + tl.load(delta, mask=mask, other=0.0)).to(dtype).to(tl.float32)
        up = (up + tl.load(delta + size, mask=mask, other=0.0)).to(dtype).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * stride_out + columns, result.to(out.dtype.element_ty), mask=mask)
