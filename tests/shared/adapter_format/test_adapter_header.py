from contextlib import suppress

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from shared.adapter_format.header import MAX_HEADER_BYTES, TensorInfo, read_header, read_header_of
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import safetensors_bytes

TENSORS = {"b": torch.ones(2, 3), "a": torch.arange(5, dtype=torch.bfloat16), "empty": torch.ones(0, 4)}
FILE = save(TENSORS, metadata={"format": "pt"})


def read(data):
    return read_header(lambda offset, length: data[offset : offset + length], len(data))


def refused(data):
    with pytest.raises(AdapterInvalid) as caught:
        read(data)
    return caught.value


def test_a_file_of_the_safetensors_library(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(FILE)
    header = read_header_of(tmp_path / "x.safetensors")
    assert header == read(FILE)
    assert {name: (info.dtype, info.shape) for name, info in header.items()} == {
        "a": ("BF16", (5,)),
        "b": ("F32", (2, 3)),
        "empty": ("F32", (0, 4)),
    }
    for name, info in header.items():
        assert FILE[info.begin : info.end] == TENSORS[name].view(torch.uint8).numpy().tobytes()


def test_no_tensors():
    assert read(safetensors_bytes({"__metadata__": {"format": "pt"}})) == {}


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_offsets_count_from_the_start_of_the_file():
    data = safetensors_bytes({"x": entry()}, bytes(8))
    assert read(data) == {"x": TensorInfo("F32", (2,), len(data) - 8, len(data))}


@pytest.mark.parametrize("length", range(len(FILE)))
def test_every_truncation_is_refused(length):
    assert set(refused(FILE[:length]).metadata) <= {"file", "tensor"}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"x": entry()}, bytes(9), "1 bytes after the last tensor"),
        ({"x": entry(begin=4, end=12)}, bytes(12), "hole"),
        ({"x": entry(), "y": entry(begin=4, end=12)}, bytes(12), "overlaps"),
        ({"x": entry(), "y": entry(begin=12, end=20)}, bytes(20), "hole"),
        ({"x": entry(), "y": entry()}, bytes(8), "overlaps"),
        ({"x": entry(shape=(3,))}, bytes(8), "takes 12"),
        ({"x": entry(dtype="F33")}, bytes(8), "F33"),
        ({"x": entry(dtype=["F32"])}, bytes(8), "dtype"),
        ({"x": entry(shape=(-2,))}, bytes(8), "shape"),
        ({"x": entry(shape=(True, 2))}, bytes(8), "shape"),
        ({"x": entry(shape=(1,) * 9)}, bytes(8), "shape"),
        ({"x": entry(shape=(1 << 62,) * 8)}, bytes(8), "shape"),
        ({"x": {**entry(), "data_offsets": [8, 0]}}, bytes(8), "data_offsets"),
        ({"x": {**entry(), "data_offsets": [0, 8, 8]}}, bytes(8), "data_offsets"),
        ({"x": {**entry(), "data_offsets": [0, 8.0]}}, bytes(8), "data_offsets"),
        ({"x": {**entry(), "more": 1}}, bytes(8), "header entry"),
        ({"x": {"dtype": "F32"}}, bytes(8), "header entry"),
        ({"x": 3}, bytes(8), "header entry"),
        ({"__metadata__": []}, b"", "__metadata__"),
        (b"[]", b"", "not a JSON object"),
        (b"\xff", b"", "not valid JSON"),
        (b'{"x": 1, "x": 2}', b"", "occurs twice"),
        (b'{"x": NaN}', b"", "NaN"),
        (b"[" * 50_000, b"", "nested too deeply"),
    ],
)
def test_malformed_headers(header, data, match):
    assert match in refused(safetensors_bytes(header, data)).message


def test_long_names_are_cut_in_errors():
    assert len(refused(safetensors_bytes({"x" * 10_000: 3})).message) < 500


def test_a_huge_header_is_not_read():
    def read_range(offset, length):
        assert length == 8
        return (MAX_HEADER_BYTES + 1).to_bytes(8, "little")

    with pytest.raises(AdapterInvalid, match="the limit is"):
        read_header(read_range, 1 << 40)


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_flipped_bytes_raise_nothing_else(position, mask):
    data = bytearray(FILE)
    data[position] ^= mask
    with suppress(AdapterInvalid):
        read(bytes(data))


fuzzed = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "BF16", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), fuzzed), st.binary(max_size=16))
@example({"a": {"dtype": {}, "shape": [], "data_offsets": [0, 0]}}, b"")
def test_fuzzed_objects_raise_nothing_else(header, data):
    with suppress(AdapterInvalid):
        read(safetensors_bytes(header, data))


@given(st.binary(max_size=64))
def test_random_files_raise_nothing_else(data):
    with suppress(AdapterInvalid):
        read(data)
