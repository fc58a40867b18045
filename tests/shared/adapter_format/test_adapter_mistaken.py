"""A file that is something else says what it is, and how to get the right one."""

import gzip
import io
import pickle
import random

import pytest
import torch

from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import read_header
from shared.errors import AdapterInvalid

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1024\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"


def torch_saved(**options):
    buffer = io.BytesIO()
    torch.save({"lora_A": torch.ones(2, 2)}, buffer, **options)
    return buffer.getvalue()


MISTAKES = {
    "pointer": (POINTER, "is a Git LFS pointer", "git lfs pull"),
    "page": (PAGE, "is a web page", "download the file itself"),
    "page with a mark": (b"\xef\xbb\xbf\n" + PAGE, "is a web page", "download the file itself"),
    "refusal of a store": (b'<?xml version="1.0"?><Error/>', "is a web page, or a server's answer", "with a token"),
    "torch.save": (torch_saved(), "is a zip archive, as torch.save writes", "safe_serialization=True"),
    "old torch.save": (torch_saved(_use_new_zipfile_serialization=False), "is a pickle", "safe_serialization=True"),
    "newer pickle": (pickle.dumps([1] * 9, protocol=5), "is a pickle", "safe_serialization=True"),
    "gguf": (b"GGUF\x03\0\0\0" + b"\0" * 16, "is a GGUF file, which llama.cpp reads", "as PEFT saved it"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "is compressed with gzip", "unpack it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_in_place_of_either_file(name):
    data, problem, advice = MISTAKES[name]
    with pytest.raises(AdapterInvalid) as of_weights:
        read_header(lambda offset, length: data[offset : offset + length], len(data))
    with pytest.raises(AdapterInvalid) as of_config:
        parse_adapter_config(data)
    for caught, file in [(of_weights, "adapter_model.safetensors"), (of_config, "adapter_config.json")]:
        assert caught.value.metadata == {"file": file}
        assert caught.value.message.startswith(f"{file}: {problem}")
        assert advice in caught.value.message.rpartition("; ")[2]


def test_a_servers_error_in_json_in_place_of_weights():
    data = b'{"error": "Repository not found"}'
    with pytest.raises(AdapterInvalid, match=r"is JSON: perhaps a server's error; download the file itself"):
        read_header(lambda offset, length: data[offset : offset + length], len(data))


@pytest.mark.parametrize("length", [b"<", b"<!", b"{", b'{"', b"\x80\x02", b"\x1f\x8b", b"PK", b"\n<a"])
def test_the_length_of_a_header_is_not_taken_for_the_beginning_of_something_else(length):
    data = length.ljust(8, b"\0") + b"{"
    with pytest.raises(AdapterInvalid, match="is truncated: 9 bytes with a header of"):
        read_header(lambda offset, length: data[offset : offset + length], len(data))


def test_gzip_whose_first_bytes_are_a_small_length():
    data = gzip.compress(random.Random(1).randbytes(700_000), mtime=0)
    assert int.from_bytes(data[:4], "little") < len(data)
    with pytest.raises(AdapterInvalid, match="is compressed with gzip; unpack it"):
        read_header(lambda offset, length: data[offset : offset + length], len(data))


def test_what_is_not_known_keeps_its_number():
    data = b"\xff" * 64
    with pytest.raises(AdapterInvalid, match="has a header of 18446744073709551615 bytes; the limit is"):
        read_header(lambda offset, length: data[offset : offset + length], len(data))
