import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from shared.adapter_format.finite import FiniteScan, check_finite
from shared.adapter_format.header import read_header
from shared.errors import AdapterInvalid

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def data_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_extremes_are_finite(name):
    limits = torch.finfo(torch.float32 if name == "F64" else DTYPES[name])  # which float64 becomes
    values = [limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal / 2, 0.0, -0.0]
    check_finite("x", name, data_of(torch.tensor(values, dtype=DTYPES[name])))
    check_finite("x", name, b"")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 1, 131_072, 299_999])
def test_one_bad_element_is_found(name, value, position):
    tensor = torch.zeros(300_000, dtype=DTYPES[name])
    tensor[position] = value
    with pytest.raises(AdapterInvalid, match="NaN or Inf") as caught:
        check_finite("layer.lora_A.weight", name, data_of(tensor))
    assert caught.value.metadata == {"tensor": "layer.lora_A.weight"}


def test_other_dtypes_are_refused():
    with pytest.raises(AdapterInvalid, match="I32"):
        check_finite("x", "I32", bytes(4))


def scan(data, sizes):
    scanner = FiniteScan(read_header(lambda offset, length: data[offset : offset + length], len(data)))
    offset = 0
    while offset < len(data):
        size = sizes[offset % len(sizes)]
        scanner.feed(data[offset : offset + size])
        offset += size


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.sampled_from(["a", "b", "c", None]), st.integers(0, 4))
def test_scan_finds_it_however_the_file_is_cut(sizes, bad, index):
    tensors = {
        "a": torch.ones(5, dtype=torch.float64),
        "b": torch.ones(5),
        "c": torch.ones(5, dtype=torch.bfloat16),
        "d": torch.ones(0),
    }
    if bad is None:
        scan(save(tensors), sizes)
        return
    tensors[bad][index] = float("inf")
    with pytest.raises(AdapterInvalid) as caught:
        scan(save(tensors), sizes)
    assert caught.value.metadata == {"tensor": bad}
