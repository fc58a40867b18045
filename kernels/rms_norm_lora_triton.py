# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""RMSNorm after a residual addition with the expand of what is added in it: one program a row.

Semantics: `kernels.rms_norm`. What x gains is rounded as `kernels.lora.expand` rounds it, but never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import rms_norm_triton
from kernels.delta import add_row, b_tile, constants, find_b, read_chunk
from kernels.lora import add
from kernels.table import Addend

COLUMNS_PER_WARP = 256
MAX_WARPS = 16
REGISTER_TILE = 65536  # elements of B that a program holds at once


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, addend: Addend, out: Tensor | None = None
) -> Tensor:
    """See `kernels.rms_norm.add_rms_norm`. Chunks of many rows take an expand in place and a norm."""
    v, table, layer, group, chunks = addend
    if chunks.rows_per_chunk > 1:
        add(x, addend)
        return rms_norm_triton.add_rms_norm(x, residual, weight, eps, out)
    rows, size = x.shape
    if out is None:
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _add_rms_norm[chunks.list.shape[0],](
        x, residual, weight, out, v, table.weights, table.entries, chunks.list, rows, layer, group.modules[0],
        table.num_layers, x.stride(0), residual.stride(0), out.stride(0), eps, **constants(table),
        SPLITS=v.shape[0], BLOCK_RANK=max(1, min(16, REGISTER_TILE // block)), SIZE=size, BLOCK=block,
        num_warps=min(max(block // COLUMNS_PER_WARP, 1), MAX_WARPS),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "layer", "module"], do_not_specialize_on_alignment=["chunks"])
def _add_rms_norm(
    x, residual, weight, out, v, weights, entries, chunks, num_rows, layer, module,
    num_layers, stride_x, stride_residual, stride_out, eps,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, row, count = read_chunk(chunks, tl.program_id(0))
    if count == 0:
        return
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    b, rank, scale = find_b(weights, entries, slot, layer, module, num_layers, UNIT, MODULES)
    tile = b_tile(b, 0, rank, SIZE, columns, mask, BLOCK_RANK)
    gain = tl.load(weight + columns, mask=mask, other=0.0)
    total = add_row(
        tl.load(x + row * stride_x + columns, mask=mask, other=0.0), tile, b, scale, v, row, 0, rank, num_rows,
        SIZE, columns, mask, 1, SPLITS, MAX_RANK, BLOCK_RANK,
    )  # fmt: skip
    target = residual + row * stride_residual + columns
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    summed = (total.to(tl.float32) + before).to(residual.dtype.element_ty)
    tl.store(target, summed, mask=mask)
    values = summed.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    normed = normed.to(x.dtype.element_ty).to(tl.float32) * gain.to(tl.float32)
    result = normed.to(weight.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(out + row * stride_out + columns, result, mask=mask)
