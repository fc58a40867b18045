# Triton is untyped, and the bodies of its kernels are not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

"""What the expands share: how blocks of columns cover a packed output."""

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.table import Group


class ColumnBlocks(NamedTuple):
    """The boundaries after each of at most three modules (the last one repeated), and the number of blocks."""

    end0: int
    end1: int
    end2: int
    num_blocks: int


def column_blocks(group: Group, block: int) -> ColumnBlocks:
    """Blocks of at most `block` columns, none over a boundary between two modules."""
    ends = (*group.columns[1:], group.columns[-1], group.columns[-1])[:3]
    num_blocks = sum(triton.cdiv(end - begin, block) for begin, end in zip((0, *ends), ends, strict=False))
    return ColumnBlocks(ends[0], ends[1], ends[2], num_blocks)


@triton.jit
def locate_columns(block, end0, end1, end2, BLOCK: tl.constexpr):
    """Semantics: of column block `block`: the module's index in the group, its first and its end column, and the
    block's first column counted from the module's first."""
    blocks0 = tl.cdiv(end0, BLOCK)
    blocks1 = blocks0 + tl.cdiv(end1 - end0, BLOCK)
    index = (block >= blocks0).to(tl.int32) + (block >= blocks1).to(tl.int32)
    begin = tl.where(index == 0, 0, tl.where(index == 1, end0, end1))
    end = tl.where(index == 0, end0, tl.where(index == 1, end1, end2))
    first_block = tl.where(index == 0, 0, tl.where(index == 1, blocks0, blocks1))
    return index, begin, end, (block - first_block) * BLOCK
