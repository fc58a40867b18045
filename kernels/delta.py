# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""What an adapter adds to its rows' outputs: device functions that the shrinks and the expands share.

A row's result depends on no other row; the ops differ in the order of float32 sums.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.table import NUM_MODULES, OFFSET_UNIT, AdapterTable


def constants(table: AdapterTable) -> dict[str, int]:
    """Compile-time constants of a kernel that reads entries."""
    unit = OFFSET_UNIT // table.weights.element_size()
    return {"UNIT": unit, "MODULES": NUM_MODULES}


def overlapped(y: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that may start while the one before it still runs, and waits for it itself."""
    return {"OVERLAP": True, "launch_pdl": True} if y.is_cuda else {"OVERLAP": False}


@triton.jit
def read_chunk(chunks, number):
    """Slot, first row (int64) and number of rows."""
    chunk = chunks + number * 4
    return tl.load(chunk), tl.load(chunk + 1).to(tl.int64), tl.load(chunk + 2)


@triton.jit
def find_b(weights, entries, slot, layer, module, num_layers, UNIT: tl.constexpr, MODULES: tl.constexpr):
    """Pointer to B `[rank, out]`, rank (0 for slot −1) and scale."""
    entry = entries + ((tl.maximum(slot, 0) * num_layers + layer) * MODULES + module) * 4
    rank = tl.where(slot < 0, 0, tl.load(entry + 2))
    b = weights + tl.multiple_of(tl.load(entry + 1).to(tl.int64) * UNIT, UNIT)
    return b, rank, tl.load(entry + 3).to(tl.float32, bitcast=True)


@triton.jit
def b_tile(b, r0, rank, out_features, columns, column_mask, BLOCK_RANK: tl.constexpr):
    """`[BLOCK_RANK, columns]` from row `r0`."""
    rs = r0 + tl.arange(0, BLOCK_RANK)
    mask = (rs < rank)[:, None] & column_mask[None, :]
    return tl.load(b + rs[:, None] * out_features + columns[None, :], mask=mask, other=0.0)


@triton.jit
def largest_rank(
    entries, slots, mask, layer, first_module, num_layers, GROUP_SIZE: tl.constexpr, MODULES: tl.constexpr
):
    """Of a group's modules in each slot, which decides between `kernels.bgmv` and `kernels.tall`; 0 outside `mask`."""
    entry = entries + ((slots * num_layers + layer) * MODULES + first_module) * 4
    rank = tl.load(entry + 2, mask=mask, other=0)
    for index in tl.static_range(1, GROUP_SIZE):
        rank = tl.maximum(rank, tl.load(entry + index * 4 + 2, mask=mask, other=0))
    return rank


@triton.jit
def v_tile(
    v, rows, row_mask, index, r0, rank, num_rows, splits, scale, dtype: tl.constexpr,
    GROUP_SIZE: tl.constexpr, MAX_SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """scale · v `[rows, BLOCK_RANK]` for the tensor cores: in half precision as the sum of two halves, high and low, so
    that it is not rounded to one. All splits are asked for at once; how many there are is no variant of the kernel."""
    rs = r0 + tl.arange(0, BLOCK_RANK)
    mask = row_mask[:, None] & (rs < rank)[None, :]
    offsets = (rows[:, None] * GROUP_SIZE + index) * MAX_RANK + rs[None, :]
    total = tl.load(v + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, MAX_SPLITS):
        v += num_rows.to(tl.int64) * GROUP_SIZE * MAX_RANK
        total += tl.load(v + offsets, mask=mask & (split < splits), other=0.0)
    total *= scale
    high = total.to(dtype)
    return high, (total - high.to(tl.float32)).to(dtype)


@triton.jit
def dot_wide(high, low, tile, total):
    """`total` plus (high + low) · tile."""
    total = tl.dot(high, tile, total, input_precision="ieee")
    if tile.dtype != tl.float32:
        total = tl.dot(low, tile, total, input_precision="ieee")
    return total


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Everything that kernels before this one wrote can be read after it. Every program must call it: the next kernel
    takes it that whatever came before this one is over as well."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next kernel may start, up to its wait, once every program of this one has come here."""
    if OVERLAP:
        gdc_launch_dependents()
