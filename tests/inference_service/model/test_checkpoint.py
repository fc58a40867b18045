"""Tensors arrive in their places whatever the sizes of pieces, the number of readers and the dtypes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inference_service.model.checkpoint import Source, read_tensors
from shared.adapter_format.header import read_header_of
from shared.errors import BaseModelMismatch

SHAPES = {"one": (1,), "row": (7,), "matrix": (33, 65), "deep": (3, 5, 17), "none": (0, 4)}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def sources_of(file: Path, places: dict[str, torch.Tensor]) -> list[Source]:
    return [Source(file, info, places[name]) for name, info in read_header_of(file).items()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_readers", "piece_bytes"), [(1, 1 << 20), (3, 64), (8, 1000)])
def test_every_tensor_in_every_dtype(
    device: str, stored: torch.dtype, wanted: torch.dtype, num_readers: int, piece_bytes: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(stored) for name, shape in SHAPES.items()}
    names = sorted(tensors)
    places = {name: torch.full(shape, torch.nan, dtype=wanted, device=device) for name, shape in SHAPES.items()}
    sources = []
    for number, part in enumerate((names[:2], names[2:])):
        file = tmp_path / f"{number}.safetensors"
        save_file({name: tensors[name] for name in part}, file)
        sources += sources_of(file, places)
    read_tensors(sources, num_readers, piece_bytes)
    for name, place in places.items():
        assert torch.equal(place.cpu(), tensors[name].to(wanted)), name


def test_part_of_a_larger_tensor_is_filled_alone(tmp_path: Path) -> None:
    whole = torch.zeros(10, 8)
    save_file({"part": torch.ones(4, 8)}, tmp_path / "a.safetensors")
    read_tensors(sources_of(tmp_path / "a.safetensors", {"part": whole[3:7]}), 4, 32)
    assert whole.sum(1).tolist() == [0, 0, 0, 8, 8, 8, 8, 0, 0, 0]


def test_a_file_that_shrinks_or_goes_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"matrix": torch.ones(100, 100)}, file)
    sources = sources_of(file, {"matrix": torch.empty(100, 100)})
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(BaseModelMismatch, match=r"model\.safetensors cannot be read: it has become shorter"):
        read_tensors(sources)
    file.unlink()
    with pytest.raises(BaseModelMismatch) as caught:
        read_tensors(sources)
    assert caught.value.metadata == {"file": "model.safetensors"}


def test_nothing_to_read() -> None:
    read_tensors([])
