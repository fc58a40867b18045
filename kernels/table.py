"""Where the kernels find adapters: one tensor of weights, and one entry for each (slot, layer, module)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

NUM_MODULES = 7
MAX_RANK = 512
OFFSET_UNIT = 16

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


class LoraRows(NamedTuple):
    """Which adapter each row of a batch uses.

    `segments`: in row order, without base-model rows. `row_slots`: `[rows]` int32 on the GPU, −1 for base-model rows;
    None on a CPU. The first `num_decodes` rows are one row a sequence; the others come in longer runs.
    """

    segments: tuple[Segment, ...]
    row_slots: Tensor | None
    num_decodes: int


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
    """

    weights: Tensor
    entries: Tensor
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
