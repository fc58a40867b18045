# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""RMSNorm on a GPU: one program a row, which holds the row in registers. Semantics: `kernels.rms_norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_WARP = 512  # 16 a thread: two 16-byte loads in half precision
MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    return _launch(x, None, None, weight, eps, out)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.rms_norm.add_rms_norm`."""
    return _launch(x, residual, delta, weight, eps, out)


def _launch(
    x: Tensor, residual: Tensor | None, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    rows, size = x.shape
    if out is None:
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    warps = min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS)
    added = x if residual is None else residual
    _rms_norm[rows,](
        x, x if delta is None else delta, added, weight, out, x.stride(0), added.stride(0), out.stride(0), eps,
        SIZE=size, BLOCK=block, DELTA=delta is not None, ADD=residual is not None, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm(
    x, delta, residual, weight, out, stride_x, stride_residual, stride_out, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    gain = tl.load(weight + columns, mask=mask, other=0.0)
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        values += tl.load(delta + row * SIZE + columns, mask=mask, other=0.0)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    if ADD:
        residual += row * stride_residual + columns
        total = (values + tl.load(residual, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual, total, mask=mask)
        values = total.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    normed = normed.to(x.dtype.element_ty).to(tl.float32) * gain.to(tl.float32)
    result = normed.to(weight.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(out + row * stride_out + columns, result, mask=mask)
