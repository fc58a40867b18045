"""A base product, and beside it, on streams of their own, what the adapters add to its result.

On a CPU, one after the other.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import lora, reference
from kernels.affine import apply_affine
from kernels.table import SMALL_RANK, AdapterTable, Chunks, Group

SIDE_ROWS = 16  # rows a chunk up to which the base product waits for memory, not for the tensor cores
RESERVED_MULTIPROCESSORS = 8  # stream adapters while a product runs; more would slow the product down


class Sides(NamedTuple):
    """Streams for adapters of small rank, and for the others."""

    small: torch.cuda.Stream
    tall: torch.cuda.Stream


def product_and_delta(
    base: Callable[[Tensor], Tensor],
    x: Tensor,
    table: AdapterTable,
    layer: int,
    group: Group,
    chunks: Chunks,
    sides: Sides | None,
) -> tuple[Tensor, Tensor | None]:
    """The output of a group's base linears, and what its rows' adapters add to it.

    Args:
        base: x → `[rows, columns[-1]]`, a new tensor.
        x: `[rows, in]` in the arena's dtype, last dimension contiguous.
        table, layer, group: See `kernels.lora.add_lora`.
        chunks: Cover all rows.
        sides: Streams that nothing else uses meanwhile; None on a CPU.

    Returns:
        The output, and `[rows, columns[-1]]` float32 for the next op to add to it, or None: it has been added.
    """
    y, delta = _beside(base, x, table, layer, group, chunks, sides)
    if chunks.has_affine:
        apply_affine(y, delta, table, layer, group, chunks)
    return y, delta


def _beside(
    base: Callable[[Tensor], Tensor],
    x: Tensor,
    table: AdapterTable,
    layer: int,
    group: Group,
    chunks: Chunks,
    sides: Sides | None,
) -> tuple[Tensor, Tensor | None]:
    """See `product_and_delta`; without gains and offsets."""
    if sides is None:
        y = base(x)
        reference.add_lora(y, x, table, layer, group, chunks.segments())
        return y, None
    from kernels import bgmv, sgmv, tall

    if chunks.rows_per_chunk > SIDE_ROWS:
        y = base(x)
        lora.add_chunks(y, x, table, layer, group, chunks)
        return y, None
    main = torch.cuda.current_stream()
    # All is allocated on the stream that outlives its use, and before the product, whose workspace is freed at once.
    if chunks.rows_per_chunk > 1:
        v = sgmv.shrunk(x, table, group, chunks)
        before = main.record_event()
        y = base(x)
        sides.small.wait_event(before)
        with torch.cuda.stream(sides.small):
            sgmv.sgmv_shrink(x, table, layer, group, chunks, v)
        main.wait_stream(sides.small)
        sgmv.sgmv_expand(y, v, table, layer, group, chunks, after_shrink=False)
        return y, None
    delta = torch.empty((x.shape[0], group.columns[-1]), dtype=torch.float32, device=x.device)
    parts = [(sides.small, lora.small_delta, bgmv.shrunk(x, group))]
    if chunks.max_rank > SMALL_RANK:
        parts.append((sides.tall, lora.tall_delta, tall.shrunk(x, table, group)))
    before = main.record_event()
    # The product first: kernels that hold registers on every multiprocessor would delay it.
    with _reserved_multiprocessors(RESERVED_MULTIPROCESSORS):
        y = base(x)
    for side, part, v in parts:
        side.wait_event(before)
        with torch.cuda.stream(side):
            part(delta, x, table, layer, group, chunks, v)
        main.wait_stream(side)
    return y, delta


@contextmanager
def _reserved_multiprocessors(count: int) -> Iterator[None]:
    """Products launched meanwhile leave `count` multiprocessors free; otherwise they take all for as long as they run.

    cuBLASLt is the library that heeds this.
    """
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(before)
