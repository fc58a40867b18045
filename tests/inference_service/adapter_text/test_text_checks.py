"""What registration refuses unseen is what a replica refuses when it runs it; what a replica runs is not refused."""

import json
from pathlib import Path

import pytest

from inference_service.adapter_text.loaded import LoadedText, read_base_text
from shared.adapter_format.text_checks import check_texts
from shared.errors import AdapterInvalid
from tests.inference_service.adapter_text.bases import ENDLESS, GREEDY, SHOUT, changed, with_added, write_base

TOKENS = with_added("<tool>")
WRONG = {
    "truncated tokenizer": {"tokenizer.json": TOKENS[:-3]},
    "empty tokenizer": {"tokenizer.json": b"{}"},
    "no object": {"tokenizer_config.json": b"[]"},
    "special tokens": {"special_tokens_map.json": b"{", "tokenizer_config.json": b"{}"},
    "syntax": {"chat_template.jinja": b"{% for m in messages %}{{ m.content }}"},
    "syntax in the config": {"tokenizer_config.json": json.dumps({"chat_template": "{{ messages[ }}"}).encode()},
    "new eos": {"tokenizer.json": TOKENS, "tokenizer_config.json": b'{"eos_token": "<new>"}'},
    "new in the map": {"tokenizer.json": TOKENS, "special_tokens_map.json": b'{"extra_special_tokens": ["<new>"]}'},
    "split": {"tokenizer.json": TOKENS, "tokenizer_config.json": b'{"split_special_tokens": true}'},
    "merges": {"tokenizer.json": changed(TOKENS, model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]})},
    "filter": {"chat_template.jinja": b"{{ messages | shout }}"},
    "kind of template": {"tokenizer_config.json": b'{"chat_template": 5}'},
    "pointer": {"tokenizer_config.json": b"version https://git-lfs.github.com/spec/v1\n"},
    "characters": {"chat_template.jinja": b"{{ messages }}\xff"},
}
RIGHT = {
    "tokenizer": {"tokenizer.json": TOKENS, "tokenizer_config.json": b'{"eos_token": "<tool>"}'},
    "template": {"chat_template.jinja": SHOUT.encode()},
    "endless": {"chat_template.jinja": ENDLESS.encode()},
    "greedy": {"chat_template.jinja": GREEDY.encode()},
    "with blocks": {"chat_template.jinja": b"{% generation %}{{ messages | tojson }}{% endgeneration %}"},
}


@pytest.mark.parametrize("name", WRONG)
def test_both_refuse_it_and_name_the_same_file(name: str, tmp_path: Path) -> None:
    model = write_base(tmp_path / "base")
    with pytest.raises(AdapterInvalid) as registering:
        check_texts(WRONG[name], model.config)
    with pytest.raises(AdapterInvalid) as running:
        LoadedText(WRONG[name], read_base_text(tmp_path / "base"), model.config.vocab_size).compile()
    assert registering.value.metadata == running.value.metadata


@pytest.mark.parametrize("name", RIGHT)
def test_neither_refuses_it(name: str, tmp_path: Path) -> None:
    model = write_base(tmp_path / "base")
    check_texts(RIGHT[name], model.config)
    text = LoadedText(RIGHT[name], read_base_text(tmp_path / "base"), model.config.vocab_size)
    if text.facts().template_file:
        text.compile()  # nothing is computed by that
