"""An adapter_config.json that is no JSON, or not as it must be written."""

import json

import pytest

from shared.adapter_format.config import parse_adapter_config
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import config


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"peft_type": "LORA", "r": NaN}',
        b'{"peft_type": "LORA", "peft_type": "LORA"}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"r": ' + b"1" * 5000 + b"}",
        b" " * (1 << 20) + b"{}",
    ],
)
def test_malformed_json_names_the_file(raw):
    with pytest.raises(AdapterInvalid) as caught:
        parse_adapter_config(raw)
    assert caught.value.metadata == {"file": "adapter_config.json"}
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a": "\\ud800"}', r"holds \ud800, which is half of a character (a surrogate pair); write the whole"),
        (b"{}\xff", "is not valid JSON: byte 2, 0xff, is no text in UTF-8; copy or download"),
        (b'\xef\xbb\xbf{"peft_type": "LORA"}', "begins with a byte order mark, which is no part of JSON; save it as"),
    ],
)
def test_what_json_is_not_written_as(raw, said):
    with pytest.raises(AdapterInvalid) as caught:
        parse_adapter_config(raw)
    assert caught.value.message.startswith(f"adapter_config.json: {said}")


def test_whole_surrogate_pairs_are_text():
    raw = json.dumps(config(base_model_name_or_path="😀")).encode()
    assert b"\\ud83d" in raw
    assert parse_adapter_config(raw).base_model_name_or_path == "😀"
