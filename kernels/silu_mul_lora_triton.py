# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""silu(gate) · up with the expand of gate and up in it, one program for each row and block of columns.

Semantics: `kernels.silu_mul`. What gate and up gain is rounded as `kernels.lora.expand` rounds it, but never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import silu_mul_triton
from kernels.delta import add_row, b_tile, constants, find_b, read_chunk
from kernels.lora import add
from kernels.table import Addend

BLOCK_RANK = 16
BLOCK = 256  # one warp, with a 16-byte load a thread in half precision


def silu_mul(gate_up: Tensor, addend: Addend, out: Tensor | None = None) -> Tensor:
    """See `kernels.silu_mul.silu_mul`. Chunks of many rows take an expand in place and an activation."""
    v, table, layer, group, chunks = addend
    if chunks.rows_per_chunk > 1:
        add(gate_up, addend)
        return silu_mul_triton.silu_mul(gate_up, out)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[triton.cdiv(size, BLOCK), chunks.list.shape[0]](
        gate_up, out, v, table.weights, table.entries, chunks.list, rows, layer, group.modules[0],
        table.num_layers, gate_up.stride(0), out.stride(0), size, **constants(table),
        SPLITS=v.shape[0], BLOCK_RANK=BLOCK_RANK, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _activate(gate, up):
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_rows", "layer", "first_module"], do_not_specialize_on_alignment=["chunks"])
def _silu_mul(
    gate_up, out, v, weights, entries, chunks, num_rows, layer, first_module,
    num_layers, stride_in, stride_out, size,
    UNIT: tl.constexpr, MODULES: tl.constexpr, MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, row, count = read_chunk(chunks, tl.program_id(1))
    if count == 0:
        return
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    b0, rank0, scale0 = find_b(weights, entries, slot, layer, first_module, num_layers, UNIT, MODULES)
    b1, rank1, scale1 = find_b(weights, entries, slot, layer, first_module + 1, num_layers, UNIT, MODULES)
    tile0 = b_tile(b0, 0, rank0, size, columns, mask, BLOCK_RANK)
    tile1 = b_tile(b1, 0, rank1, size, columns, mask, BLOCK_RANK)
    source = gate_up + row * stride_in + columns
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + size, mask=mask, other=0.0)
    gate = add_row(
        gate, tile0, b0, scale0, v, row, 0, rank0, num_rows, size, columns, mask, 2, SPLITS, MAX_RANK, BLOCK_RANK
    )
    up = add_row(
        up, tile1, b1, scale1, v, row, 1, rank1, num_rows, size, columns, mask, 2, SPLITS, MAX_RANK, BLOCK_RANK
    )
    tl.store(out + row * stride_out + columns, _activate(gate, up).to(out.dtype.element_ty), mask=mask)
