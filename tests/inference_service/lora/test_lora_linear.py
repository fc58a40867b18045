"""Blobs go through the arena, the table and the wrapped projections, and come out as x Aᵀ Bᵀ."""

import pytest
import torch
from torch import Tensor, nn

from inference_service.lora import linear
from inference_service.lora.arena import Arena
from inference_service.lora.batch import LoraBatch
from inference_service.lora.extras import Affine, SlotExtras
from inference_service.lora.linear import PROJECTIONS, LoraLinear, group_of, install
from inference_service.lora.slots import SlotTable
from inference_service.types import BlobLayout
from shared.base_model import ModelConfig, linear_shape, parse_config
from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.inference_service.lora.blobs import Blob

CPU = torch.device("cpu")
CONFIG: ModelConfig = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 36,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
)
SHAPES = [linear_shape(CONFIG, module) for module in range(7)]
ALL = {(layer, module): 1 + (layer + 2 * module) % 5 for layer in range(2) for module in range(7)}
PART = {(1, 0): 3, (1, 2): 8, (1, 6): 200}


class Projection(nn.Module):
    """A base projection that ignores its second argument, as the model's do."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features), requires_grad=False)

    def forward(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        return x @ self.weight.t()


def decoder() -> nn.Module:
    layers = []
    for _ in range(CONFIG.num_layers):
        layer = nn.ModuleDict({"self_attn": nn.Module(), "mlp": nn.Module()})
        for path, modules in PROJECTIONS.items():
            group = group_of(CONFIG, modules)
            parent, name = path.split(".")
            layer[parent].add_module(name, Projection(group.columns[-1], group.in_features))
        layers.append(layer)
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return model


class Pool:
    """A host arena with blobs in it, a device arena, and a slot table."""

    def __init__(self, blobs: list[Blob], dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        host = torch.cat([blob.bytes for blob in blobs])
        self.host = host.pin_memory() if device.type == "cuda" else host
        self.starts = [sum(blob.bytes.numel() for blob in blobs[:i]) for i in range(len(blobs))]
        self.blobs = blobs
        self.slots = SlotTable(4, 1 << 20)
        self.arena = Arena(1 << 20, 4, CONFIG.num_layers, dtype, device, self.host)

    def load(self, index: int) -> int:
        placement = self.slots.reserve(str(index), self.blobs[index].layout).placement
        assert placement is not None
        slot, layout = placement.handle.slot, self.blobs[index].layout
        copy = self.arena.load(slot, layout, placement.chunk_offsets, self.starts[index])
        while not copy.is_done():
            assert self.arena.table.weights.is_cuda
        return slot


def check_everywhere(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    pool = Pool([Blob(ALL, SHAPES, dtype), Blob(PART, SHAPES, dtype, seed=1)], dtype, device)
    slots = [pool.load(0), -1, pool.load(1), -1]
    model = decoder().to(device, dtype)
    bases = {name: module for name, module in model.named_modules() if isinstance(module, Projection)}
    install(model, CONFIG, pool.arena)
    lengths = [1, 1, 20, 3]
    batch = LoraBatch.build(slots, lengths, device)
    assert batch is not None
    for layer in range(CONFIG.num_layers):
        for path, modules in PROJECTIONS.items():
            projection = model.get_submodule(f"layers.{layer}.{path}")
            assert isinstance(projection, LoraLinear)
            base = bases[f"layers.{layer}.{path}"]
            x = torch.randn(sum(lengths), projection.group.in_features).to(device, dtype)
            expected = base(x, None).double()
            for blob, start, end in ((pool.blobs[0], 0, 1), (pool.blobs[1], 2, 22)):
                for index, module in enumerate(modules):
                    columns = slice(*projection.group.columns[index : index + 2])
                    if (layer, module) in blob.a:
                        expected[start:end, columns] += blob.delta(x[start:end].cpu(), layer, module).to(device)
            torch.testing.assert_close(projection(x, batch).double(), expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(projection(x, None), base(x, None))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
def test_every_projection_adds_what_each_row_asks_for(dtype: torch.dtype, tolerance: float) -> None:
    check_everywhere(CPU, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_projection_on_a_gpu() -> None:
    check_everywhere(torch.device("cuda"), torch.bfloat16, 5e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_gains_and_offsets_of_some_rows(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WIDENED_ROWS", 4)
    pool = Pool([Blob(ALL, SHAPES, dtype), Blob(ALL, SHAPES, dtype, seed=1)], dtype)
    rich, plain = pool.load(0), pool.load(1)
    gain, offset = torch.rand(12) + 0.5, torch.randn(12)  # of k_proj
    pool.arena.extras[rich] = SlotExtras({(1, 1): Affine(gain, offset)}, {}, None, None, 0)
    group = group_of(CONFIG, (0, 1, 2))
    base = Projection(group.columns[-1], group.in_features).to(dtype)
    projection = LoraLinear(base, pool.arena, 1, group)
    x = torch.randn(14, group.in_features).to(dtype)
    batch = LoraBatch.build([-1, rich, plain], [3, 6, 5], CPU, pool.arena.extras)
    expected = base(x, None).double()
    for blob, start, end in ((pool.blobs[0], 3, 9), (pool.blobs[1], 9, 14)):
        for index, module in enumerate(group.modules):
            expected[start:end, group.columns[index] : group.columns[index + 1]] += blob.delta(x[start:end], 1, module)
    expected[3:9, 36:48] = expected[3:9, 36:48] * gain + offset
    torch.testing.assert_close(projection(x, batch).double(), expected, rtol=tolerance, atol=tolerance)


def test_group_columns() -> None:
    assert group_of(CONFIG, (0, 1, 2)) == ((0, 1, 2), (0, 36, 48, 60), 36)
    assert group_of(CONFIG, (6,)) == ((6,), (0, 36), 72)


def test_a_slot_used_again_serves_the_new_adapter() -> None:
    pool = Pool([Blob(ALL, SHAPES), Blob(ALL, SHAPES, seed=1)])
    group = group_of(CONFIG, (6,))
    projection = LoraLinear(Projection(36, 72), pool.arena, 0, group)
    x = torch.randn(3, 72)

    def added() -> Tensor:
        return (projection(x, LoraBatch.build([0], [3], CPU)) - projection(x, None)).double()

    slot = pool.load(0)
    torch.testing.assert_close(added(), pool.blobs[0].delta(x, 0, 6), rtol=1e-4, atol=1e-4)
    pool.arena.clear(slot)
    assert not added().any()
    handle = pool.slots.residents()[0].handle
    pool.slots.release(handle)
    pool.slots.free(handle)
    assert pool.load(1) == slot
    torch.testing.assert_close(added(), pool.blobs[1].delta(x, 0, 6), rtol=1e-4, atol=1e-4)


def test_a_blob_that_does_not_belong_here_is_refused() -> None:
    pool = Pool([Blob(PART, SHAPES)])
    layout = pool.blobs[0].layout

    def load(**changes: object) -> None:
        fields = {"nbytes": layout.nbytes, "rank": layout.rank, "dtype": layout.dtype, "chunks": layout.chunks}
        pool.arena.load(0, BlobLayout(**(fields | changes)), [0], 0)

    with pytest.raises(AdapterInvalid, match="the blob holds float16, the adapter arena float32") as caught:
        load(dtype="float16")
    assert caught.value.metadata == {"key": "dtype"}
    with pytest.raises(UnsupportedAdapter, match="rank 513 is above 512"):
        load(rank=513)
    with pytest.raises(AdapterInvalid, match="layer 2 is beyond the base model's 2"):
        load(chunks=(layout.chunks[0]._replace(layer=2),))
    assert not pool.arena.table.entries.any()


def test_batch_segments() -> None:
    batch = LoraBatch.build([0, 0, -1, 2, 2, 1], [1, 1, 1, 5, 2, 3], CPU)
    assert batch == (((0, 0, 2), (2, 3, 10), (1, 10, 13)), None, ())
    assert LoraBatch.build([-1, -1], [1, 9], CPU) is None
    assert LoraBatch.build([3], [0], CPU) is None
    assert LoraBatch.build([], [], CPU) is None


def test_rich_segments_are_those_of_adapters_with_extras() -> None:
    batch = LoraBatch.build([0, -1, 2, 1], [2, 1, 5, 3], CPU, extras={1, 2, 7})
    assert batch is not None
    assert batch.rich == ((2, 3, 8), (1, 8, 11))
    assert batch.part(1, 5) == (((0, 0, 1), (2, 2, 4)), None, ((2, 2, 4),))
    assert batch.part(8, 11) == (((1, 0, 3),), None, ((1, 0, 3),))
    assert batch.part(2, 3) == ((), None, ())


def test_segments_of_one_slot_with_base_rows_between_stay_apart() -> None:
    batch = LoraBatch.build([0, -1, 0], [2, 1, 2], CPU)
    assert batch is not None
    assert batch.segments == ((0, 0, 2), (0, 3, 5))
