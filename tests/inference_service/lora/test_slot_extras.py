"""An adapter's extras follow its bytes through the arena, and go with its slot."""

import torch

from inference_service.lora.arena import Arena
from inference_service.lora.extras import Affine, Outside, Rows, SlotExtras
from inference_service.lora.residents import Handle, Move
from inference_service.types import BlobLayout, ChunkLayout, ExtraLayout

CPU = torch.device("cpu")
GAIN = torch.arange(8, dtype=torch.float32) + 1
NORM = torch.arange(4, dtype=torch.float32) - 2
IDS = torch.tensor([3, 9])
ROWS = torch.arange(8, dtype=torch.float32).view(2, 4)


def blob() -> tuple[torch.Tensor, BlobLayout]:
    """A last norm and rows of the embedding outside the layers, and a gain in layer 1."""
    host = torch.zeros(256, dtype=torch.uint8)
    extras = []
    end = 0
    for name, layer, module, tensor in (
        ("norm", -1, -1, NORM), ("embed.ids", -1, -1, IDS), ("embed.rows", -1, -1, ROWS), ("gain", 1, 4, GAIN),
    ):  # fmt: skip
        data = tensor.contiguous().view(torch.uint8).flatten()
        host[end : end + data.numel()] = data
        dtype = str(tensor.dtype).removeprefix("torch.")
        extras.append(ExtraLayout(name, layer, module, end, tuple(tensor.shape), dtype))
        end += data.numel()
    outside = extras[3].offset
    chunks = (ChunkLayout(-1, 0, outside, ()), ChunkLayout(1, outside, end - outside, ()))
    return host, BlobLayout(end, 0, "float32", chunks, tuple(extras), extra_vocab=2)


def check(arena: Arena, slot: int) -> None:
    extras = arena.extras[slot]
    gain, offset = extras.affine[1, 4]
    assert offset is None
    assert gain is not None
    assert torch.equal(gain, GAIN)
    places = arena.table.affines[slot]  # what the kernels see
    start, none = places[1, 4].tolist()
    assert torch.equal(arena._bytes.view(torch.float32)[4 * start :][: GAIN.numel()], GAIN)
    assert none == -1
    assert (places.flatten() >= 0).sum() == 1
    assert torch.equal(extras.norms[-1, "norm"], NORM)
    assert extras.embed is not None
    assert extras.embed.rows is not None
    assert torch.equal(extras.embed.rows.ids, IDS)
    assert torch.equal(extras.embed.rows.rows, ROWS)
    assert extras.embed.factors is None
    assert extras.head is None
    assert extras.extra_vocab == 2


def test_they_are_there_once_the_copy_has_arrived_move_with_the_chunks_and_go_with_the_slot() -> None:
    host, layout = blob()
    arena = Arena(4096, 2, 2, torch.float32, CPU, host)
    sizes = [chunk.nbytes for chunk in layout.chunks]
    assert arena.load(1, layout, [2048, 1024], 0).is_done()
    check(arena, 1)
    handle = Handle(1, 1)
    arena.move([Move(handle, 1024, 0, sizes[1]), Move(handle, 2048, 512, sizes[0])])
    arena._bytes[1024:] = 0xFF
    arena.relocate(1, layout, [512, 0])
    check(arena, 1)
    arena.clear(1)
    assert not arena.extras


def test_a_slot_used_again_by_an_adapter_without_extras_has_none() -> None:
    host, layout = blob()
    arena = Arena(4096, 2, 2, torch.float32, CPU, host)
    arena.load(0, layout, [0, 512], 0)
    arena.load(0, BlobLayout(16, 0, "float32", (ChunkLayout(0, 0, 16, ()),)), [1024], 0)
    assert not arena.extras
    assert (arena.table.affines == -1).all()


def test_only_gains_and_offsets_are_known_to_the_kernels() -> None:
    affine = {(0, 1): Affine(GAIN, None)}
    assert SlotExtras(affine, {}, None, None, 0).is_affine
    assert not SlotExtras(affine, {(0, "input_layernorm"): NORM}, None, None, 0).is_affine
    assert not SlotExtras(affine, {}, Outside(None, Rows(IDS, ROWS), None), None, 0).is_affine
    assert not SlotExtras(affine, {}, None, Outside(None, None, Affine(None, GAIN)), 0).is_affine
    assert not SlotExtras({}, {}, None, None, 2).is_affine
