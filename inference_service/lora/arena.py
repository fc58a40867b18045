"""The adapters' bytes on the device, and the table by which the kernels find them."""

# torch.cuda and Tensor.split are untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inference_service.lora.adapter import Copy
from inference_service.lora.copies import CopyQueue, Piece, SideStream
from inference_service.lora.extras import Affine, SlotExtras, extras_of
from inference_service.lora.residents import Move
from inference_service.lora.slot_rows import SlotRows
from inference_service.types import BlobLayout, ChunkLayout
from kernels.beside import Sides
from kernels.table import A_OFFSET, B_OFFSET, MAX_RANK, NUM_MODULES, OFFSET_UNIT, RANK, SCALE, AdapterTable
from shared.errors import AdapterInvalid, UnsupportedAdapter

PIECE_BYTES = 2 << 20
BOUNCE_BYTES = 16 << 20  # on the device, for moves onto themselves


class Done:
    """A copy that has arrived."""

    bytes_left = 0

    def is_done(self) -> bool:
        """It is."""
        return True


class Arena:
    """A byte tensor that adapters share, and its table. All methods belong to the thread that launches the steps.

    `extras`: by slot, what adapters have beside the A and B of linears; slots without are not in it.
    `ranks`: by slot, the largest one of its linears in the table, for the next step.

    Args:
        nbytes: Size of the arena.
        num_slots: Adapters it can name at once.
        num_layers: Layers of the base model.
        dtype: Of weights and activations.
        device: Where it lives.
        host: The shared host arena, a flat uint8 tensor on the CPU; page-locked already where `device` is a GPU.
    """

    def __init__(
        self, nbytes: int, num_slots: int, num_layers: int, dtype: torch.dtype, device: torch.device, host: Tensor
    ) -> None:
        self._host = host
        self._bytes = torch.empty(nbytes - nbytes % OFFSET_UNIT, dtype=torch.uint8, device=device)
        shape = (num_slots, num_layers, NUM_MODULES, 4)
        entries = torch.zeros(shape, dtype=torch.int32, device=device)
        affines = torch.full((*shape[:-1], 2), -1, dtype=torch.int32, device=device)
        self.table = AdapterTable(self._bytes.view(dtype), entries, affines=affines)
        self._entry_rows, self._affine_rows = SlotRows(entries), SlotRows(affines)
        self._has_affines = [False] * num_slots  # in the table
        self.extras: dict[int, SlotExtras] = {}
        self.ranks = [0] * num_slots
        self._bounce = torch.empty(min(BOUNCE_BYTES, nbytes), dtype=torch.uint8, device=device)
        self._copies: CopyQueue | None = None  # None on a CPU, where a copy is done at once
        self.sides: Sides | None = None  # for what adapters add, beside a base projection
        if device.type == "cuda":
            self._copies = CopyQueue(SideStream(device), time.monotonic)
            self.sides = Sides(torch.cuda.Stream(device), torch.cuda.Stream(device))

    def load(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int], host_offset: int) -> Copy:
        """Start to copy a blob from the host arena into a free slot; on a CPU it is done on return.

        Args:
            slot: Where the kernels find it.
            layout: What the blob holds.
            chunk_offsets: Where each chunk of the layout goes, in bytes from the start of the arena.
            host_offset: Where the blob starts, in bytes from the start of the host arena.

        Raises:
            AdapterInvalid: the blob's dtype is not the arena's, or it names a layer that the base model lacks.
            UnsupportedAdapter: a rank is beyond what the kernels serve.
        """
        self._check(layout)
        entries = self._entries(layout, chunk_offsets)
        extras = extras_of(layout, self._bytes, chunk_offsets)
        pieces = self._pieces(layout.chunks, chunk_offsets, host_offset)
        arrive = partial(self._arrive, slot, entries, extras)
        if self._copies is not None:
            return self._copies.add(pieces, arrive)
        for target, source in pieces:
            target.copy_(source)
        arrive()
        return Done()

    def move(self, moves: Iterable[Move]) -> None:
        """Move bytes of adapters that are not on their way, in order, on the compute stream: steps launched before read
        them in the old place. `relocate` must follow before the next step."""
        for source, target, nbytes in _joined(moves):
            if source - target >= nbytes:
                self._bytes[target : target + nbytes].copy_(self._bytes[source : source + nbytes])
            else:
                self._slide(source, target, nbytes)

    def _slide(self, source: int, target: int, nbytes: int) -> None:
        """A move onto itself: front first, so that each piece is written where all has been read."""
        for start in range(0, nbytes, self._bounce.numel()):
            piece = self._bounce[: nbytes - start]
            piece.copy_(self._bytes[source + start : source + start + piece.numel()])
            self._bytes[target + start : target + start + piece.numel()].copy_(piece)

    def relocate(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int]) -> None:
        """Let the steps launched from now on find a slot's chunks at these offsets. See `load`."""
        self._arrive(slot, self._entries(layout, chunk_offsets), extras_of(layout, self._bytes, chunk_offsets))

    def clear(self, slot: int) -> None:
        """Make the kernels skip `slot`. Its bytes may be given away at once: `load` waits for the steps before it."""
        self._set_entries(slot, torch.zeros(self.table.entries.shape[1:], dtype=torch.int32))
        self._set_extras(slot, None)

    def _arrive(self, slot: int, entries: Tensor, extras: SlotExtras | None) -> None:
        """A blob lies in its slot: the steps launched from now on find it there."""
        self._set_entries(slot, entries)
        self._set_extras(slot, extras)

    def _set_entries(self, slot: int, entries: Tensor) -> None:
        """Rewrite a slot's part of the table, on the compute stream."""
        self.table.forget(slot)
        self.ranks[slot] = int(entries[..., RANK].max())
        self._entry_rows.write(slot, entries)

    def _set_extras(self, slot: int, extras: SlotExtras | None) -> None:
        self.extras.pop(slot, None)
        if extras is not None:
            self.extras[slot] = extras
        affine = extras.affine if extras is not None else {}
        if affine or self._has_affines[slot]:
            self._affine_rows.write(slot, self._affines(affine))
            self._has_affines[slot] = bool(affine)

    def _affines(self, affine: Mapping[tuple[int, int], Affine]) -> Tensor:
        """`[layers, modules, 2]` int32 on the CPU: a slot's part of `AdapterTable.affines`."""
        rows = np.full((self.table.num_layers, NUM_MODULES, 2), -1, np.int32)
        for place, vectors in affine.items():
            rows[place] = [-1 if vector is None else self._unit(vector) for vector in vectors]
        return torch.from_numpy(rows)

    def _unit(self, vector: Tensor) -> int:
        """Where a view of the arena starts, in units of 16 bytes."""
        return (vector.data_ptr() - self._bytes.data_ptr()) // OFFSET_UNIT

    def _check(self, layout: BlobLayout) -> None:
        dtype = str(self.table.weights.dtype).removeprefix("torch.")
        if layout.dtype != dtype:
            raise AdapterInvalid(f"the blob holds {layout.dtype}, the adapter arena {dtype}", metadata={"key": "dtype"})
        if layout.rank > MAX_RANK:
            raise UnsupportedAdapter(
                f"rank {layout.rank} is above {MAX_RANK}, the largest served; retrain the adapter at a lower rank",
                metadata={"key": "r"},
            )
        for chunk in layout.chunks:
            if chunk.layer >= self.table.num_layers:
                raise AdapterInvalid(
                    f"layer {chunk.layer} is beyond the base model's {self.table.num_layers}",
                    metadata={"key": f"layers.{chunk.layer}"},
                )

    def _pieces(self, chunks: Sequence[ChunkLayout], chunk_offsets: Sequence[int], host_offset: int) -> Iterator[Piece]:
        for chunk, offset in zip(chunks, chunk_offsets, strict=True):
            target = self._bytes[offset : offset + chunk.nbytes]
            source = self._host[host_offset + chunk.offset : host_offset + chunk.offset + chunk.nbytes]
            yield from map(Piece, target.split(PIECE_BYTES), source.split(PIECE_BYTES))

    def _entries(self, layout: BlobLayout, chunk_offsets: Sequence[int]) -> Tensor:
        """`[layers, modules, 4]` int32 on the CPU: a slot's part of the table for chunks at these offsets."""
        rows = [
            (chunk.layer, module.module, offset + module.a_offset, offset + module.b_offset, module.rank, module.scale)
            for chunk, offset in zip(layout.chunks, chunk_offsets, strict=True)
            for module in chunk.modules
        ]
        entries = np.zeros(tuple(self.table.entries.shape[1:]), np.int32)
        if rows:
            layers, modules, a, b, ranks, scales = zip(*rows, strict=True)
            place = np.array(layers), np.array(modules)
            entries[(*place, A_OFFSET)] = np.array(a, np.int64) // OFFSET_UNIT
            entries[(*place, B_OFFSET)] = np.array(b, np.int64) // OFFSET_UNIT
            entries[(*place, RANK)] = ranks
            entries.view(np.float32)[(*place, SCALE)] = scales
        return torch.from_numpy(entries)


def _joined(moves: Iterable[Move]) -> list[tuple[int, int, int]]:
    """Source, target and bytes of moves, those as one that follow each other in both places."""
    joined: list[tuple[int, int, int]] = []
    for _, source, target, nbytes in moves:
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (source, target):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + nbytes)
        else:
            joined.append((source, target, nbytes))
    return joined
