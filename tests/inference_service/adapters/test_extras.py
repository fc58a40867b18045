"""What is computed while an adapter is packed: DoRA's gains, offsets, and which rows of saved matrices are kept."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapters import dora, packer, saved_rows
from inference_service.adapters.base_tensors import EMBED, HEAD, BaseTensors
from inference_service.adapters.dora import GainCache, embedding_norms, linear_norms
from inference_service.adapters.packer import open_adapter
from inference_service.types import BlobLayout
from shared.base_model import linear_shape, module_path, tensor_shapes
from shared.errors import AdapterInvalid, BaseModelMismatch, UnsupportedAdapter
from tests.inference_service.adapters.small_adapters import MODEL, decoded, encoded, manifest, write_safetensors

WORKERS = ThreadPoolExecutor(2, "layout")
PREFIX, RANK, ALPHA = "base_model.model.", 3, 6
FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NUMPY = {"float32": np.float32, "int64": np.int64}


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, {name: (dtype, array.shape, encoded(array, dtype)) for name, array in tensors.items()})


def base_weights(folder: Path, dtype: str = "F32") -> dict[str, np.ndarray]:
    """A checkpoint with every tensor of the tiny model; returns its numbers."""
    tensors = {name: values(seed, *shape) for seed, (name, shape) in enumerate(tensor_shapes(MODEL).items())}
    write(folder / "model.safetensors", tensors, dtype)
    return {name: decoded(encoded(array, dtype), dtype).reshape(array.shape) for name, array in tensors.items()}


def write_adapter(folder: Path, extra: dict[str, np.ndarray], **config: Any) -> dict[str, np.ndarray]:
    """A LoRA on down_proj of layer 1, and `extra` tensors."""
    path, (out, columns) = PREFIX + module_path(1, 6), linear_shape(MODEL, 6)
    tensors = {f"{path}.lora_A.weight": values(90, RANK, columns), f"{path}.lora_B.weight": values(91, out, RANK)}
    tensors |= extra
    write(folder / "adapter_model.safetensors", tensors)
    keys = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["down_proj"],
        "layers_to_transform": [1], **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    return tensors


def pack(folder: Path, base: BaseTensors | None, gains: GainCache | None = None) -> tuple[BlobLayout, bytearray]:
    dtype = base.dtype if base else "float32"
    with open_adapter(folder, manifest(folder), MODEL, dtype, base, gains) as opened:
        blob = bytearray(b"\xff" * opened.layout.nbytes)
        opened.fill(memoryview(blob), WORKERS)
    return opened.layout, blob


def extra(packed: tuple[BlobLayout, bytearray], name: str) -> np.ndarray:
    layout, blob = packed
    (found,) = [each for each in layout.extras if each.name == name]
    count = int(np.prod(found.shape))
    if found.dtype in NUMPY:
        return np.frombuffer(blob, NUMPY[found.dtype], count, found.offset).reshape(found.shape)
    nbytes = count * 2
    return decoded(bytes(blob[found.offset : found.offset + nbytes]), FILE_DTYPES[found.dtype]).reshape(found.shape)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.floats(-3, 3), st.integers(0, 99))
def test_norms_are_those_of_the_merged_weight(out: int, columns: int, rank: int, scale: float, seed: int) -> None:
    shapes = (out, columns), (rank, columns), (rank, out)
    w, a, b = (values(seed + number, *shape).astype(np.float64) for number, shape in enumerate(shapes))
    merged = w + scale * (b.T @ a)
    found = linear_norms(lambda begin, end: w[begin:end], a, b, scale)
    assert found == pytest.approx(np.linalg.norm(merged, axis=1), rel=1e-6, abs=1e-6)
    found = embedding_norms(lambda begin, end: w[begin:end], np.ascontiguousarray(b.T), a, scale)
    assert found == pytest.approx(np.linalg.norm(merged, axis=0), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gains_divide_by_the_norms_of_what_is_served(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dora, "_PIECE_NUMBERS", 100)  # several pieces
    base = base_weights(tmp_path / "base", FILE_DTYPES[dtype])
    magnitude = np.abs(values(5, MODEL.hidden_size)) + 0.5
    tensors = write_adapter(
        tmp_path / "a", {f"{PREFIX}{module_path(1, 6)}.lora_magnitude_vector": magnitude}, use_dora=True
    )
    gain = extra(pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, dtype)), "gain")
    a, b = (tensors[f"{PREFIX}{module_path(1, 6)}.lora_{side}.weight"] for side in "AB")
    merged = base[f"{module_path(1, 6)}.weight"] + ALPHA / RANK * b @ a
    expected = magnitude / np.linalg.norm(merged, axis=1)
    assert gain == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 1e-2)


def dora_adapter(folder: Path) -> None:
    write_adapter(
        folder, {f"{PREFIX}{module_path(1, 6)}.lora_magnitude_vector": np.ones(MODEL.hidden_size)}, use_dora=True
    )


def test_the_second_load_reads_the_gains(tmp_path: Path) -> None:
    base_weights(tmp_path / "base")
    dora_adapter(tmp_path / "a")
    cache = GainCache(tmp_path / "gains")
    first = pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, "float32", "weights"), cache)
    (tmp_path / "base" / "model.safetensors").unlink()
    again = pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, "float32", "weights"), cache)
    assert again == first
    for fingerprint in ("others", ""):
        with pytest.raises(BaseModelMismatch):
            pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, "float32", fingerprint), cache)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_gains_are_computed_again(tmp_path: Path, damage: str) -> None:
    base_weights(tmp_path / "base")
    dora_adapter(tmp_path / "a")
    base, cache = BaseTensors(tmp_path / "base", MODEL, "float32", "weights"), GainCache(tmp_path / "gains")
    first = pack(tmp_path / "a", base, cache)
    (file,) = (tmp_path / "gains").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 64
    file.write_bytes(data if damage == "changed" else data[:-4])
    assert pack(tmp_path / "a", base, cache) == first


def test_gains_go_when_there_are_too_many(tmp_path: Path) -> None:
    cache = GainCache(tmp_path / "gains", budget=250)
    for number in range(5):
        cache.keep(f"sha256:{number}", "weights", "float32", np.full(10, number, np.float32))
    found = [cache.find(f"sha256:{number}", "weights", "float32", 10) is not None for number in range(5)]
    assert found.count(True) == 3
    assert found[4]


def test_a_zero_row_under_dora_is_refused(tmp_path: Path) -> None:
    base = base_weights(tmp_path / "base")
    dora_adapter(tmp_path / "a")
    path = PREFIX + module_path(1, 6)
    b = np.zeros((MODEL.hidden_size, RANK), np.float32)
    name = f"{path}.lora_magnitude_vector"
    write_adapter(tmp_path / "a", {f"{path}.lora_B.weight": b, name: np.ones(MODEL.hidden_size)}, use_dora=True)
    base[f"{module_path(1, 6)}.weight"][4] = 0
    write(tmp_path / "base" / "model.safetensors", base)
    with pytest.raises(AdapterInvalid) as caught:
        pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, "float32"))
    assert caught.value.metadata["tensor"] == name


def test_without_the_base_models_weights_dora_is_refused(tmp_path: Path) -> None:
    dora_adapter(tmp_path / "a")
    with pytest.raises(UnsupportedAdapter, match="base model's weights"):
        pack(tmp_path / "a", None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_rows_that_differ_are_kept(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "_LARGEST_PIECE", 1000)
    monkeypatch.setattr(saved_rows, "_PIECE_BYTES", 700)
    base = base_weights(tmp_path / "base", FILE_DTYPES[dtype])
    embed, head = base[EMBED].copy(), base[HEAD].copy()
    embed[[63, 2, 40]] += 1
    head[[0, 41]] -= 1
    write_adapter(
        tmp_path / "a",
        {f"{PREFIX}{EMBED}": embed, f"{PREFIX}{HEAD}": head},
        modules_to_save=["embed_tokens", "lm_head"],
    )
    packed = pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, dtype))
    assert extra(packed, "embed.ids").tolist() == [2, 40, 63]
    assert extra(packed, "head.ids").tolist() == [0, 41]
    tolerance = {"float32": 0.0, "bfloat16": 2e-2}[dtype]
    assert extra(packed, "embed.rows") == pytest.approx(embed[[2, 40, 63]], rel=tolerance, abs=tolerance)
    assert extra(packed, "head.rows") == pytest.approx(head[[0, 41]], rel=tolerance, abs=tolerance)
    assert packed[0].nbytes < embed.nbytes


def test_an_activated_adapter_brings_no_rows(tmp_path: Path) -> None:
    """What PEFT saves beside a LoRA on the head is a copy as a rule; else it would act before the activation."""
    base = base_weights(tmp_path / "base")
    head = f"{PREFIX}lm_head"
    lora = {
        f"{head}.lora_A.weight": values(1, RANK, MODEL.hidden_size),
        f"{head}.lora_B.weight": values(2, MODEL.vocab_size, RANK),
    }
    for name, copy in (("same", base[HEAD]), ("rounded", decoded(encoded(base[HEAD], "BF16"), "BF16"))):
        write_adapter(
            tmp_path / name,
            lora | {f"{head}.base_layer.weight": copy.reshape(base[HEAD].shape)},
            target_modules=["down_proj", "lm_head"],
            layers_to_transform=None,
            exclude_modules=r".*\.[023]\..*",
            alora_invocation_tokens=[3],
        )
    packed = pack(tmp_path / "same", BaseTensors(tmp_path / "base", MODEL, "float32"))
    assert {each.name for each in packed[0].extras} == {"head.a", "head.b"}
    with pytest.raises(UnsupportedAdapter, match="before the activation") as caught:
        pack(tmp_path / "rounded", BaseTensors(tmp_path / "base", MODEL, "float32"))
    assert caught.value.metadata["tensor"] == f"{head}.base_layer.weight"


def test_every_tensor_of_a_blob_lies_apart_and_in_its_chunk(tmp_path: Path) -> None:
    base_weights(tmp_path / "base")
    path, size = PREFIX + module_path(1, 6), MODEL.hidden_size
    write_adapter(
        tmp_path / "a",
        {
            f"{path}.lora_magnitude_vector": np.ones(size),
            f"{PREFIX}model.norm.weight": values(7, size),
            f"{PREFIX}model.layers.0.input_layernorm.weight": values(8, size),
        },
        use_dora=True,
        modules_to_save=["model.norm", "layers.0.input_layernorm"],
    )
    layout, _ = packed = pack(tmp_path / "a", BaseTensors(tmp_path / "base", MODEL, "float32"))
    assert [chunk.layer for chunk in layout.chunks] == [-1, 0, 1]
    chunks = {chunk.layer: chunk for chunk in layout.chunks}
    spans = sorted((e.offset, e.offset + packer.extra_bytes(e)) for e in layout.extras)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for each in layout.extras:
        chunk = chunks[each.layer]
        assert chunk.offset <= each.offset
        assert each.offset + packer.extra_bytes(each) <= chunk.offset + chunk.nbytes
        assert each.offset % 16 == 0
    assert np.array_equal(extra(packed, "norm"), values(7, size))
    assert np.array_equal(extra(packed, "input_layernorm"), values(8, size))
