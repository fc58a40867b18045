"""Packed blobs against plain numpy, and files that are not what they should be."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapters import packer
from inference_service.adapters.conversion import convert
from inference_service.adapters.layout import GROUPS
from inference_service.adapters.packer import open_adapter
from inference_service.types import BlobLayout
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.base_model import linear_shape, module_path
from shared.errors import AdapterInvalid, DigestMismatch
from tests.inference_service.adapters.small_adapters import (
    MODEL,
    flip_a_bit,
    manifest,
    write_adapter,
    write_safetensors,
)

WORKERS = ThreadPoolExecutor(2, "layout")
ALL = tuple(range(7))
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _pack(folder: Path, dtype: str = "float32") -> tuple[BlobLayout, bytearray]:
    with open_adapter(folder, manifest(folder), MODEL, dtype) as opened:
        blob = bytearray(b"\xff" * opened.layout.nbytes)
        opened.fill(memoryview(blob), WORKERS)
    return opened.layout, blob


def _block(blob: bytearray, offset: int, shape: tuple[int, int], dtype: str) -> tuple[torch.Tensor, slice]:
    count = shape[0] * shape[1]
    block = torch.frombuffer(blob, dtype=TORCH[dtype], count=count, offset=offset).reshape(shape)
    return block, slice(offset, offset + count * TORCH[dtype].itemsize)


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("rank", "modules"), [(4, ALL), (3, (0, 2)), (1, (3, 5, 6))])
def test_every_block_equals_the_file(
    tmp_path: Path, source: str, target: str, rank: int, modules: tuple[int, ...]
) -> None:
    tensors = write_adapter(tmp_path, rank=rank, modules=modules, dtype=source)
    layout, blob = _pack(tmp_path, target)
    assert (layout.rank, layout.dtype, len(layout.chunks)) == (rank, target, 2)
    seen = np.zeros(len(blob), bool)
    for chunk in layout.chunks:
        assert sorted(module.module for module in chunk.modules) == sorted(modules)
        for module in chunk.modules:
            out, columns = linear_shape(MODEL, module.module)
            name = f"base_model.model.{module_path(chunk.layer, module.module)}"
            a, a_span = _block(blob, chunk.offset + module.a_offset, (rank, columns), target)
            b, b_span = _block(blob, chunk.offset + module.b_offset, (rank, out), target)
            assert torch.equal(a, torch.from_numpy(tensors[f"{name}.lora_A.weight"]).to(TORCH[target]))
            assert torch.equal(b, torch.from_numpy(tensors[f"{name}.lora_B.weight"]).to(TORCH[target]).T)
            assert module.scale == 2.0
            assert not seen[a_span].any()
            assert not seen[b_span].any()
            seen[a_span] = seen[b_span] = True
    assert not np.frombuffer(blob, np.uint8)[~seen].any(), "padding is not zero"


def test_chunks_follow_each_other_and_groups_keep_their_order(tmp_path: Path) -> None:
    write_adapter(tmp_path, modules=ALL, rank=3)
    layout, blob = _pack(tmp_path, "bfloat16")
    assert [chunk.layer for chunk in layout.chunks] == [0, 2]
    assert layout.chunks[1].offset == layout.chunks[0].nbytes
    assert layout.nbytes == len(blob) == sum(chunk.nbytes for chunk in layout.chunks)
    for chunk in layout.chunks:
        places = {m.module: m for m in chunk.modules}
        order = [o for g in GROUPS for o in ([places[m].a_offset for m in g] + [places[m].b_offset for m in g])]
        assert order == sorted(order)
        assert all(offset % 16 == 0 for offset in (*order, chunk.offset, chunk.nbytes))


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=64))
def test_float32_rounds_to_bfloat16_as_torch_does(bits: list[int]) -> None:
    numbers = np.array(bits, np.uint32).view(np.float32)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 3.38e38)]
    found = np.empty((numbers.size, 1), np.uint16)
    convert("t", memoryview(numbers.tobytes()), "F32", "bfloat16", found)
    expected = torch.from_numpy(numbers.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(found[:, 0], expected)


@pytest.mark.parametrize(("source", "target"), [("F32", "float16"), ("BF16", "float16"), ("F32", "bfloat16")])
def test_a_number_beyond_the_dtype_is_refused(tmp_path: Path, source: str, target: str) -> None:
    write_adapter(tmp_path, dtype=source, scale=1e5 if target == "float16" else 1)
    if target == "bfloat16":
        _set_first_number(tmp_path, np.float32(3.4e38).tobytes())
    with pytest.raises(AdapterInvalid, match=target) as caught:
        _pack(tmp_path, target)
    assert "lora_" in caught.value.metadata["tensor"]


def _set_first_number(folder: Path, number: bytes) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + len(number)] = number
    (folder / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_nan_and_inf_are_refused(tmp_path: Path, number: float, target: str) -> None:
    write_adapter(tmp_path)
    _set_first_number(tmp_path, np.float32(number).tobytes())
    with pytest.raises(AdapterInvalid, match="NaN or Inf"):
        _pack(tmp_path, target)


def _damage(folder: Path, how: str) -> None:
    weights = folder / WEIGHTS
    match how:
        case "last byte":
            flip_a_bit(weights)
        case "header":
            flip_a_bit(weights, 12)
        case "header length":
            flip_a_bit(weights, 0)
        case "a number became NaN":
            _set_first_number(folder, np.float32(np.nan).tobytes())
        case "config":
            flip_a_bit(folder / CONFIG, 5)
        case "truncated":
            os.truncate(weights, 500)
        case "empty":
            os.truncate(weights, 0)
        case "longer":
            weights.write_bytes(weights.read_bytes() + b"x")
        case "config gone":
            (folder / CONFIG).unlink()
        case "weights gone":
            weights.unlink()


@pytest.mark.parametrize(
    "how",
    [
        "last byte", "header", "header length", "a number became NaN", "config", "truncated", "empty", "longer",
        "config gone", "weights gone",
    ],
)  # fmt: skip
def test_files_that_are_not_what_was_registered(tmp_path: Path, how: str) -> None:
    write_adapter(tmp_path)
    files = manifest(tmp_path)
    _damage(tmp_path, how)
    with pytest.raises(DigestMismatch) as caught, open_adapter(tmp_path, files, MODEL, "float32") as opened:
        opened.fill(memoryview(bytearray(opened.layout.nbytes)), WORKERS)
    assert caught.value.metadata["file"] in (WEIGHTS, CONFIG)


def test_what_was_hashed_as_it_was_written_is_not_hashed_again(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    layout, expected = _pack(tmp_path)
    files = [file._replace(sha256="0" * 64) if file.path == WEIGHTS else file for file in manifest(tmp_path)]
    blob = bytearray(layout.nbytes)
    with open_adapter(tmp_path, files, MODEL, "float32", is_verified=True) as opened:
        opened.fill(memoryview(blob), WORKERS)
    assert blob == expected
    with pytest.raises(DigestMismatch), open_adapter(tmp_path, files, MODEL, "float32") as opened:
        opened.fill(memoryview(blob), WORKERS)


def test_rows_larger_and_smaller_than_a_piece_are_converted_alike() -> None:
    random = np.random.default_rng(0)
    for rows, columns in ((3, 40_000), (40_000, 3), (1, 1), (32_768, 2)):
        numbers = random.standard_normal((rows, columns)).astype(np.float32)
        out = np.empty((columns, rows), np.uint16).T
        convert("t", memoryview(numbers.tobytes()), "F32", "bfloat16", out)
        expected = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("piece", [1, 700, 5000])
def test_a_file_read_in_many_pieces_is_the_same_blob(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path, modules=ALL, rank=3, dtype="F16")
    layout, blob = _pack(tmp_path, "bfloat16")
    monkeypatch.setattr(packer, "_PIECE_BYTES", piece)
    read: list[int] = []
    with open_adapter(tmp_path, manifest(tmp_path), MODEL, "bfloat16") as opened:
        again = bytearray(b"\xee" * opened.layout.nbytes)
        opened.fill(memoryview(again), WORKERS, read.append)
    assert (opened.layout, again) == (layout, blob)
    header = int.from_bytes((tmp_path / WEIGHTS).read_bytes()[:8], "little")
    assert sum(read) == (tmp_path / WEIGHTS).stat().st_size - header - 8
    assert len(read) > 1


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    with open_adapter(tmp_path, manifest(tmp_path), MODEL, "float32") as opened:
        os.truncate(tmp_path / WEIGHTS, 2000)
        with pytest.raises(DigestMismatch, match="cut short"):
            opened.fill(memoryview(bytearray(opened.layout.nbytes)), WORKERS)


def test_registered_files_that_do_not_fit_keep_their_reason(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 5, "target_modules": ["q_proj", "v_proj"]}))
    with pytest.raises(AdapterInvalid, match="target_modules promises"):
        _pack(tmp_path)
    write_safetensors(tmp_path / WEIGHTS, {})
    with pytest.raises(AdapterInvalid):
        _pack(tmp_path)
