"""Where the kernels find adapters: one tensor of weights, and one entry for each (slot, layer, module)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUM_MODULES = 7
MAX_RANK = 512
OFFSET_UNIT = 16
SMALL_RANK = 16  # up to which decode takes an adapter row by row; above, in tiles of rows
TILE_ROWS = 16

# Columns of an entry.
A_OFFSET, B_OFFSET, RANK, SCALE = range(4)


class Group(NamedTuple):
    """Consecutive modules that read the same input and write adjacent columns of one packed output.

    `columns`: `len(modules) + 1` boundaries; module `modules[i]` writes columns `columns[i]` up to `columns[i + 1]`.
    """

    modules: tuple[int, ...]
    columns: tuple[int, ...]
    in_features: int


class Segment(NamedTuple):
    """Rows `start` up to `end` of a batch use the adapter in `slot`."""

    slot: int
    start: int
    end: int


class Chunks(NamedTuple):
    """The GPU's work list: runs of at most `rows_per_chunk` rows with one slot, which together cover every row once.

    `list`: `[max_chunks, 4]` int32: slot (−1: base model), first row, rows (0: no work), and, of chunks of one row,
    how many rows the tile has that starts there: up to `TILE_ROWS` neighbouring rows with one slot (0: the row is in
    a tile that started before). No kernel may write it while a kernel before the one that reads it still runs, since
    kernels read it before they wait.

    `max_rank`: no adapter in the list has a larger one, whatever is written to the list later.

    `has_affine`: whether adapters in the list may have gains or offsets.
    """

    list: Tensor
    rows_per_chunk: int
    max_rank: int = MAX_RANK
    has_affine: bool = False

    def segments(self) -> tuple[Segment, ...]:
        """The chunks that have rows with an adapter. Reads the list back."""
        rows: list[list[int]] = self.list.tolist()
        return tuple(Segment(slot, row, row + count) for slot, row, count, _ in rows if slot >= 0 and count)


def chunk_list(
    segments: Sequence[Segment], rows_per_chunk: int, max_chunks: int, num_rows: int
) -> npt.NDArray[np.int32]:
    """What `Chunks.list` holds: `[max_chunks, 4]` int32, for `num_rows` rows of which `segments` names those with an
    adapter, in row order. Raises ValueError if they take more than `max_chunks`."""
    chunks: list[tuple[int, int, int, int]] = []
    end = 0
    for segment in (*segments, Segment(-1, num_rows, num_rows)):
        for slot, start, stop in (Segment(-1, end, segment.start), segment):
            chunks += [
                (
                    slot,
                    row,
                    min(rows_per_chunk, stop - row),
                    min(TILE_ROWS, stop - row) * ((row - start) % TILE_ROWS == 0),
                )
                for row in range(start, stop, rows_per_chunk)
            ]
        end = segment.end
    if len(chunks) > max_chunks:
        raise ValueError(f"{len(chunks)} chunks do not fit in {max_chunks}")
    found = np.zeros((max_chunks, 4), np.int32)
    found[:, 0] = -1
    if chunks:
        found[: len(chunks)] = chunks
    return found


def max_chunks(rows: int, sequences: int, rows_per_chunk: int) -> int:
    """The most chunks that `rows` rows of at most `sequences` sequences, and padding after them, can take."""
    runs = min(rows, sequences + 1)
    return runs + (rows - runs) // rows_per_chunk


class LoraRows(NamedTuple):
    """Which adapter each row of a batch uses.

    `segments`: in row order, without base-model rows. `chunks`: the same on the GPU; None on a CPU.
    """

    segments: tuple[Segment, ...]
    chunks: Chunks | None


class ModuleExpand(NamedTuple):
    """One module's expand: `y[:, begin:end] += scale · v[:, first:last] @ b`. `position`: its place in the group."""

    position: int
    b: Tensor  # [rank, out]
    scale: float
    first: int
    last: int
    begin: int
    end: int


class ShrinkPart(NamedTuple):
    """Modules whose A blocks follow each other in memory, so that one product with `a` serves them all."""

    a: Tensor  # [in, sum of ranks], a transposed view
    expands: tuple[ModuleExpand, ...]


@dataclass(frozen=True)
class AdapterTable:
    """The adapters in their slots. Freely shared; whoever changes an entry calls `forget(slot)`.

    `weights`: `[elements]`, the arena in its dtype.
    `entries`: `[slots, layers, modules, 4]` int32: where A starts, where B starts (units of 16 bytes from the start of
    the arena), rank (0: this module is not adapted), and the bits of the float32 scale.
    `max_rank`: of any entry; sizes what is between shrink and expand.
    `affines`: `[slots, layers, modules, 2]` int32: where gain and offset start (likewise, float32), −1 for none.
    """

    weights: Tensor
    entries: Tensor
    max_rank: int = MAX_RANK
    affines: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    _parts: dict[int, dict[tuple[int, Group], tuple[ShrinkPart, ...]]] = field(default_factory=dict, repr=False)

    @property
    def scales(self) -> Tensor:
        """`entries` seen as float32: its last column is the scale."""
        return self.entries.view(torch.float32)

    @property
    def num_layers(self) -> int:
        """Layers of the base model."""
        return self.entries.shape[1]

    def forget(self, slot: int) -> None:
        """Drop the cached views of `slot`."""
        self._parts.pop(slot, None)

    def parts(self, slot: int, layer: int, group: Group) -> tuple[ShrinkPart, ...]:
        """Views of the group's adapted modules in one layer of `slot`; empty if there are none.

        Built on the first call after a change of the slot, which reads the entries; later calls are look-ups.
        """
        of_slot = self._parts.setdefault(slot, {})
        found = of_slot.get((layer, group))
        if found is None:
            found = of_slot[layer, group] = self._build_parts(slot, layer, group)
        return found

    def _build_parts(self, slot: int, layer: int, group: Group) -> tuple[ShrinkPart, ...]:
        unit = OFFSET_UNIT // self.weights.element_size()
        entries, scales = self.entries[slot, layer].tolist(), self.scales[slot, layer].tolist()
        runs: list[list[tuple[int, int]]] = []  # of (index in the group, start of A in elements)
        end = -1
        for index, module in enumerate(group.modules):
            start, rank = entries[module][A_OFFSET] * unit, entries[module][RANK]
            if not rank:
                continue
            if start != end:
                runs.append([])
            runs[-1].append((index, start))
            end = start + rank * group.in_features
        return tuple(self._part(run, entries, scales, group) for run in runs)

    def _part(
        self,
        run: Sequence[tuple[int, int]],
        entries: list[list[int]],
        scales: list[list[float]],
        group: Group,
    ) -> ShrinkPart:
        unit = OFFSET_UNIT // self.weights.element_size()
        expands: list[ModuleExpand] = []
        total = 0
        for index, _ in run:
            module, begin, end = group.modules[index], group.columns[index], group.columns[index + 1]
            rank, start = entries[module][RANK], entries[module][B_OFFSET] * unit
            b = self.weights[start : start + rank * (end - begin)].view(rank, end - begin)
            expands.append(ModuleExpand(index, b, scales[module][SCALE], total, total + rank, begin, end))
            total += rank
        first = run[0][1]
        a = self.weights[first : first + total * group.in_features].view(total, group.in_features)
        return ShrinkPart(a.t(), tuple(expands))
