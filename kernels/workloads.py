"""Named mixtures of adapters in a batch, shared by tests and benchmarks, and random adapters to fill a table with."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.table import (
    A_OFFSET,
    B_OFFSET,
    NUM_MODULES,
    OFFSET_UNIT,
    RANK,
    SCALE,
    AdapterTable,
    Chunks,
    Group,
    Segment,
    chunk_list,
    max_chunks,
)

NAMES = ("distinct", "uniform", "zipf", "identical", "skewed", "mixed-rank", "all-ranks")
MIXED_RANKS = (1, 3, 8, 64, 200)
ALL_RANKS = (8, 16, 32, 64, 128)
MAX_DISTINCT = 64


class Workload(NamedTuple):
    """`ranks`: by slot. `row_slots`: by row, equal slots together, −1 for the base model."""

    ranks: tuple[int, ...]
    row_slots: tuple[int, ...]

    def segments(self) -> tuple[Segment, ...]:
        """The runs of rows with an adapter."""
        found: list[Segment] = []
        for row, slot in enumerate(self.row_slots):
            if found and found[-1].slot == slot and found[-1].end == row:
                found[-1] = found[-1]._replace(end=row + 1)
            elif slot >= 0:
                found.append(Segment(slot, row, row + 1))
        return tuple(found)


def workload(name: str, rows: int, rank: int = 16, seed: int = 0) -> Workload:
    """The workload `name` over `rows` rows.

    distinct: each row its own adapter (at most 64). uniform: 8 adapters at random. zipf: 16 adapters, the n-th as
    likely as 1/n. identical: one adapter. skewed: half of the rows on one, the others distinct. mixed-rank: adapters of
    ranks 1, 3, 8, 64 and 200, and base-model rows. all-ranks: distinct, of ranks 8, 16, 32, 64 and 128 in turn.
    """
    draw = random.Random(seed)
    ranks = [rank] * MAX_DISTINCT
    if name == "all-ranks":
        ranks = [ALL_RANKS[slot % len(ALL_RANKS)] for slot in range(MAX_DISTINCT)]
    if name in ("distinct", "all-ranks"):
        slots = [row % MAX_DISTINCT for row in range(rows)]
    elif name == "uniform":
        slots = [draw.randrange(8) for _ in range(rows)]
    elif name == "zipf":
        slots = draw.choices(range(16), [1 / n for n in range(1, 17)], k=rows)
    elif name == "identical":
        slots = [0] * rows
    elif name == "skewed":
        slots = [0 if row < (rows + 1) // 2 else 1 + row % (MAX_DISTINCT - 1) for row in range(rows)]
    elif name == "mixed-rank":
        ranks = list(MIXED_RANKS)
        slots = [(row + 1) % (len(ranks) + 1) - 1 for row in range(rows)]
    else:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    used = max(slots) + 1
    return Workload(tuple(ranks[:used]), tuple(sorted(slots, key=lambda slot: (slot < 0, slot))))


def prompts(rows: int, adapters: int, rank: int = 16) -> Workload:
    """`adapters` prompts of equal length with an adapter each, `rows` tokens in all."""
    return Workload((rank,) * adapters, tuple(row * adapters // rows for row in range(rows)))


def chunks_of(load: Workload, rows_per_chunk: int, device: str = "cpu") -> Chunks:
    """The work list of `load`, with room for as many sequences as it has runs of rows."""
    rows = len(load.row_slots)
    sequences = rows if rows_per_chunk == 1 else len(set(load.row_slots))
    found = chunk_list(load.segments(), rows_per_chunk, max_chunks(rows, sequences, rows_per_chunk), rows)
    return Chunks(torch.from_numpy(found).to(device), rows_per_chunk, max(load.ranks))


def random_table(
    ranks: Sequence[int],
    groups: Sequence[Group],
    num_layers: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AdapterTable:
    """A table with one adapter a slot, random in every module of `groups`: A ~ N(0, 1/in), B ~ N(0, 1/rank).

    Between A blocks of modules of one group there is no gap beyond alignment; everywhere else the arena holds NaN.
    """
    size = dtype.itemsize
    entries = torch.zeros((len(ranks), num_layers, NUM_MODULES, 4), dtype=torch.int32)
    scales = entries.view(torch.float32)
    blocks: list[tuple[int, int, float]] = []  # of (start in elements, elements, standard deviation)
    end = OFFSET_UNIT
    for slot, rank in enumerate(ranks):
        for layer in range(num_layers):
            for group in groups:
                for column, elements, deviation, module in _group_blocks(group, rank):
                    entries[slot, layer, module, column] = end // OFFSET_UNIT
                    blocks.append((end // size, elements, deviation))
                    end += -(-elements * size // OFFSET_UNIT) * OFFSET_UNIT
                    entries[slot, layer, module, RANK] = rank
                    scales[slot, layer, module, SCALE] = 0.5 + slot / len(ranks)
                end += OFFSET_UNIT
    return AdapterTable(_fill(blocks, end // size, dtype, device, seed), entries.to(device), max(ranks))


def _group_blocks(group: Group, rank: int) -> list[tuple[int, int, float, int]]:
    """(A_OFFSET or B_OFFSET, elements, standard deviation, module) of all A blocks of a group, then all B blocks."""
    widths = [end - begin for begin, end in zip(group.columns, group.columns[1:], strict=False)]
    a = [(A_OFFSET, rank * group.in_features, group.in_features**-0.5, module) for module in group.modules]
    b = [(B_OFFSET, rank * width, rank**-0.5, module) for module, width in zip(group.modules, widths, strict=True)]
    return a + b


def _fill(
    blocks: Sequence[tuple[int, int, float]], elements: int, dtype: torch.dtype, device: str, seed: int
) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    weights = torch.full((elements,), float("nan"), dtype=dtype, device=device)
    for start, count, deviation in blocks:
        block = torch.randn(count, generator=generator, device=device) * deviation
        weights[start : start + count] = block.to(dtype)
    return weights
