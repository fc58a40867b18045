"""The adapters' bytes on the device, and the table by which the kernels find them."""

# torch.cuda and Tensor.split are untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from inference_service.types import BlobLayout, ChunkLayout
from kernels.table import A_OFFSET, B_OFFSET, MAX_RANK, NUM_MODULES, OFFSET_UNIT, RANK, SCALE, AdapterTable
from shared.errors import AdapterInvalid, UnsupportedAdapter

# A step's small metadata copies queue behind the adapter copies on the same copy engine.
BYTES_IN_FLIGHT = 8 << 20
PIECE_BYTES = 2 << 20


class AdapterCopy:
    """One adapter on its way from the host arena into its slot. `pieces`: (target, source) not yet issued."""

    def __init__(self, arena: "Arena", slot: int, pieces: Iterable[tuple[Tensor, Tensor]], entries: Tensor) -> None:
        self.slot = slot
        self.pieces = deque(pieces)
        self.entries = entries
        self.has_arrived = False
        self._arena = arena

    def is_done(self) -> bool:
        """Whether the next step may use the adapter and the blob may go. Never waits; moves the arena's copies on."""
        if not self.has_arrived:
            self._arena.advance()
        return self.has_arrived


class Arena:
    """A byte tensor that adapters share, and its table. All methods belong to the thread that launches the steps.

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
        self.table = AdapterTable(self._bytes.view(dtype), torch.zeros(shape, dtype=torch.int32, device=device))
        self._copies: deque[AdapterCopy] = deque()
        self._is_cuda = device.type == "cuda"
        self.side: torch.cuda.Stream | None = None  # for shrinks beside a base projection
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self.side = torch.cuda.Stream(device)
            self._issued: torch.cuda.Event | None = None
            self._staging = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
            self._staged: dict[int, torch.cuda.Event] = {}

    def load(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int], host_offset: int) -> AdapterCopy:
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
        entries = self._entries(layout.chunks, chunk_offsets)
        copy = AdapterCopy(self, slot, self._pieces(layout.chunks, chunk_offsets, host_offset), entries)
        if self._is_cuda:
            # The ranges may have been another adapter's: wait for every step launched so far.
            self._stream.wait_stream(torch.cuda.current_stream())
        self._copies.append(copy)
        self.advance()
        return copy

    def clear(self, slot: int) -> None:
        """Make the kernels skip `slot`. Its bytes may be given away at once: `load` waits for the steps before it."""
        self._set_entries(slot, torch.zeros(self.table.entries.shape[1:], dtype=torch.int32))

    def advance(self) -> None:
        """Finish the copies that have arrived, in order of `load`, and issue the next pieces. Never waits."""
        if self._is_cuda and self._issued is not None and not self._issued.query():
            return
        self._finish()
        if self._is_cuda:
            self._issue()
            return
        for copy in self._copies:
            for target, source in copy.pieces:
                target.copy_(source)
            copy.pieces.clear()
        self._finish()

    def _finish(self) -> None:
        while self._copies and not self._copies[0].pieces:
            copy = self._copies.popleft()
            self._set_entries(copy.slot, copy.entries)
            copy.has_arrived = True

    def _issue(self) -> None:
        self._issued = None
        nbytes = 0
        with torch.cuda.stream(self._stream):
            for copy in self._copies:
                while copy.pieces and nbytes < BYTES_IN_FLIGHT:
                    target, source = copy.pieces.popleft()
                    target.copy_(source, non_blocking=True)
                    nbytes += target.numel()
            if nbytes:
                self._issued = self._stream.record_event()

    def _set_entries(self, slot: int, entries: Tensor) -> None:
        """Rewrite a slot's part of the table, on the compute stream."""
        self.table.forget(slot)
        if not self._is_cuda:
            self.table.entries[slot] = entries
            return
        if slot in self._staged:
            self._staged[slot].synchronize()  # the last copy out of this staging row; long done
        self._staging[slot] = entries
        self.table.entries[slot].copy_(self._staging[slot], non_blocking=True)
        self._staged[slot] = torch.cuda.current_stream().record_event()

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

    def _pieces(
        self, chunks: Sequence[ChunkLayout], chunk_offsets: Sequence[int], host_offset: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk, offset in zip(chunks, chunk_offsets, strict=True):
            target = self._bytes[offset : offset + chunk.nbytes]
            source = self._host[host_offset + chunk.offset : host_offset + chunk.offset + chunk.nbytes]
            yield from zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True)

    def _entries(self, chunks: Sequence[ChunkLayout], chunk_offsets: Sequence[int]) -> Tensor:
        """`[layers, modules, 4]` int32 on the CPU: a slot's part of the table for chunks at these offsets."""
        entries = torch.zeros(self.table.entries.shape[1:], dtype=torch.int32)
        scales = entries.view(torch.float32)
        for chunk, offset in zip(chunks, chunk_offsets, strict=True):
            for module in chunk.modules:
                place = chunk.layer, module.module
                entries[place][A_OFFSET] = (offset + module.a_offset) // OFFSET_UNIT
                entries[place][B_OFFSET] = (offset + module.b_offset) // OFFSET_UNIT
                entries[place][RANK] = module.rank
                scales[place][SCALE] = module.scale
        return entries
