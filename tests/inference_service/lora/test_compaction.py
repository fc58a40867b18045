"""Adapters that are moved within the arena: every byte arrives, and nobody who uses them notices."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.lora import arena as arena_module
from inference_service.lora.adapter import AdapterState
from inference_service.lora.arena import Arena
from inference_service.lora.batch import LoraBatch
from inference_service.lora.gaps import UNIT
from inference_service.lora.linear import LoraLinear, group_of
from inference_service.lora.pool import AdapterPool
from inference_service.lora.residents import Handle, Move
from inference_service.lora.slots import SlotTable
from inference_service.types import Acquired
from tests.inference_service.lora.blobs import Blob
from tests.inference_service.lora.test_lora_linear import ALL, CONFIG, CPU, PART, SHAPES, Projection

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
DEVICES = ["cpu", CUDA]


class Replica:
    """A pool over a real arena whose blobs are all in host memory; bytes that nobody wrote are 0xEE."""

    def __init__(self, blobs: list[Blob], arena_bytes: int, device: str, dtype: torch.dtype, move_bytes: int) -> None:
        host = torch.cat([blob.bytes for blob in blobs])
        self.host = host.pin_memory() if device == "cuda" else host
        self.blobs = {str(index): blob for index, blob in enumerate(blobs)}
        self.starts = {str(i): sum(b.bytes.numel() for b in blobs[:i]) for i in range(len(blobs))}
        self.arena = Arena(arena_bytes, 8, CONFIG.num_layers, dtype, torch.device(device), self.host)
        self.bytes = self.arena.table.weights.view(torch.uint8)
        self.bytes.fill_(0xEE)
        self.slots = SlotTable(8, arena_bytes, move_bytes=move_bytes)
        self.pool = AdapterPool(self.slots, self.arena, self._acquire, lambda digest: None, lambda: 0.0)
        self.asked: list[str] = []

    def _acquire(self, digest: str) -> None:
        self.asked.append(digest)

    def polls_until_ready(self, digest: str) -> Iterator[None]:
        """One poll after the other, as between steps, with everybody else's bytes checked after each."""
        self.pool.load(digest, pinned=False)
        for asked in self.asked:
            self.pool.on_acquired(Acquired(asked, self.starts[asked], self.blobs[asked].layout))
        self.asked.clear()
        for _ in range(10_000):
            self.pool.poll()
            self.check_bytes()
            if self.pool.state(digest) is AdapterState.READY:
                return
            assert self.pool.state(digest) in (AdapterState.PLACING, AdapterState.COPYING)
            yield

    def load(self, digest: str) -> None:
        for _ in self.polls_until_ready(digest):
            pass

    def check_bytes(self) -> None:
        """What is in the arena where each resident lies is its blob, chunk for chunk."""
        self.pool.check_integrity()
        for resident in self.slots.residents():
            if resident.is_arriving:
                continue
            blob = self.blobs[resident.digest]
            for chunk, place in zip(blob.layout.chunks, resident.ranges, strict=True):
                found = self.bytes[place.start : place.start + chunk.nbytes].cpu()
                assert torch.equal(found, blob.bytes[chunk.offset : chunk.offset + chunk.nbytes])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounce", [UNIT, 4 << 20])
@pytest.mark.parametrize("shift", [1, 3, 17, 40])
def test_a_chunk_slides_onto_itself(device: str, bounce: int, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "BOUNCE_BYTES", bounce)
    arena = Arena(64 * UNIT, 1, 1, torch.float32, torch.device(device), torch.empty(0, dtype=torch.uint8))
    data = torch.randint(0, 256, (20 * UNIT,), dtype=torch.uint8)
    memory = arena.table.weights.view(torch.uint8)
    memory[44 * UNIT :] = data
    arena.move([Move(Handle(0, 1), 44 * UNIT, (44 - shift) * UNIT, data.numel())])
    assert torch.equal(memory[(44 - shift) * UNIT :][: data.numel()].cpu(), data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("move_bytes", [1, 64 << 20])
def test_a_running_adapter_answers_the_same_before_and_after_it_moved(device: str, move_bytes: int) -> None:
    """Of four adapters two go; a fifth needs the room of both in one piece, so that the others must move."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wide = {(0, 6): 400, (1, 6): 5}
    blobs = [Blob(ranks, SHAPES, dtype, seed) for seed, ranks in enumerate((ALL, PART, ALL, PART, wide))]
    needed = [sum(-(-c.nbytes // UNIT) * UNIT for c in blob.layout.chunks) for blob in blobs]
    replica = Replica(blobs, sum(needed[:4]) + needed[4] - needed[0] - needed[2], device, dtype, move_bytes)
    pool = replica.pool
    for digest in "0123":
        replica.load(digest)
    handles = [pool.acquire("1"), pool.acquire("3")]
    group = group_of(CONFIG, (6,))
    base = Projection(36, 72).to(device, dtype)
    projection = LoraLinear(base, replica.arena, 1, group)
    x = torch.randn(8, 72).to(device, dtype)

    def answer() -> torch.Tensor:
        batch = LoraBatch.build([handle.slot for handle in handles], [5, 3], torch.device(device))
        return projection(x, batch)

    before = answer()
    assert not torch.equal(before, base(x, None))
    pool.begin_unload("0")
    pool.begin_unload("2")
    places = [replica.slots.resolve(handle).ranges for handle in handles]
    polls = 0
    for _ in replica.polls_until_ready("4"):
        polls += 1
        assert torch.equal(answer(), before)
    assert torch.equal(answer(), before)
    assert places != [replica.slots.resolve(handle).ranges for handle in handles]
    assert pool.counters.moves >= 1
    assert pool.counters.evictions == {"unload": 2}
    if move_bytes == 1:
        assert polls >= pool.counters.moves - 1, "more than one chunk was moved in a step"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=8, max_size=40),
    st.sampled_from([1, 3000, 64 << 20]),
)
def test_any_sequence_of_loads_and_unloads_keeps_every_byte(
    steps: list[tuple[int, bool, bool]], move_bytes: int
) -> None:
    ranks = [{(0, 6): 1 + 4 * i, (1, 0): 2 + i, (1, 6): 3} for i in range(5)]
    blobs = [Blob(each, SHAPES, torch.float32, seed) for seed, each in enumerate(ranks)]
    replica = Replica(blobs, 48 << 10, "cpu", torch.float32, move_bytes)
    held: dict[str, Handle] = {}
    for index, is_unload, keep in steps:
        digest = str(index)
        if digest in held and is_unload:
            replica.pool.release(held.pop(digest))
        if is_unload:
            replica.pool.begin_unload(digest)
        elif digest not in held:
            room = replica.slots.num_bytes - sum(replica.slots.find(d).nbytes for d in held)  # type: ignore[union-attr]
            if replica.slots.bytes_for(blobs[index].layout) <= room:
                replica.load(digest)
                if keep:
                    held[digest] = replica.pool.acquire(digest)
    replica.check_bytes()
    assert replica.pool.counters.needless_reloads == 0


def test_the_cpu_finds_a_moved_adapter_by_its_new_place() -> None:
    """The cached views of a slot are dropped when it moves."""
    replica = Replica([Blob(ALL, SHAPES), Blob(ALL, SHAPES, seed=1)], 1 << 20, "cpu", torch.float32, 1 << 20)
    replica.load("0")
    replica.load("1")
    handle = replica.pool.acquire("1")
    projection = LoraLinear(Projection(36, 72), replica.arena, 0, group_of(CONFIG, (6,)))
    x = torch.randn(3, 72)
    batch = LoraBatch.build([handle.slot], [3], CPU)
    expected = projection(x, batch)
    replica.pool.begin_unload("0")
    resident = replica.slots.resolve(handle)
    offsets = [chunk.start for chunk in resident.ranges]
    moves = [
        Move(handle, offset, offset - offsets[0], chunk.size)
        for offset, chunk in zip(offsets, resident.ranges, strict=True)
    ]
    replica.arena.move(moves)
    replica.bytes[offsets[-1] :] = 0xEE
    replica.arena.relocate(handle.slot, replica.blobs["1"].layout, [move.target for move in moves])
    assert torch.equal(projection(x, batch), expected)
