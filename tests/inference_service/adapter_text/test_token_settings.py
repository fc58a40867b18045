"""Which token settings are refused: those by which transformers' token ids would not be tokenizer.json's alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from inference_service.adapter_text.loaded import BaseText, LoadedText
from shared.adapter_format.text_checks import check_texts
from shared.adapter_format.texts import MAX_BYTES
from shared.adapter_format.token_settings import check_token_settings
from shared.base_model import parse_config
from shared.errors import AdapterInvalid
from tests.inference_service.adapter_text.bases import with_added
from tests.inference_service.serving_fakes import raw_config

PROMPTS = ("cat<tool> a <new>!<end> b", "<new>cat <tool><eos>")
NEW = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
PLAIN = {**NEW, "special": False, "normalized": True}
TOKENIZER = with_added(AddedToken("<tool>", special=False), AddedToken("<end>", special=True), "cat b")
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "known": {"eos_token": "<end>", "pad_token": "<bos>", "extra_special_tokens": ["<end>"]},
    "named plain": {"pad_token": "<tool>"},
    "named plain and listed": {"pad_token": "<tool>", "added_tokens_decoder": {"258": {**PLAIN, "content": "<tool>"}}},
    "named plain, not listed": {"pad_token": "<tool>", "added_tokens_decoder": {}},
    "extra plain": {"extra_special_tokens": ["<tool>"]},
    "named by model": {"extra_special_tokens": {"image_token": "<end>"}, "padding_side": "left"},
    "listed": {"added_tokens_decoder": {"3": {**NEW, "content": "<end>"}}},
    "limits": {"model_max_length": 2, "add_bos_token": True, "add_prefix_space": True, "split_special_tokens": False},
    "new eos": {"eos_token": "<new>"},
    "new pad": {"pad_token": {"__type": "AddedToken", **NEW}},
    "new image": {"image_token": "<new>"},
    "a letter": {"additional_special_tokens": ["a"]},
    "new extra": {"extra_special_tokens": ["<new>"]},
    "new by name": {"extra_special_tokens": {"image_token": "<new>"}},
    "new listed": {"added_tokens_decoder": {"261": NEW}},
    "stripped": {"added_tokens_decoder": {"259": {**NEW, "content": "<end>", "rstrip": True}}},
    "split": {"split_special_tokens": True},
}


def saved(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in MAX_BYTES if (folder / name).is_file()}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_accepted_has_transformers_ids_and_what_is_refused_has_others(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS[name]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = saved(tmp_path)
    try:
        check_token_settings(files)
        own = LoadedText(files, BaseText({}, None, None, None), 1000)
        is_accepted = True
    except AdapterInvalid:
        own = LoadedText({"tokenizer.json": TOKENIZER}, BaseText({}, None, None, None), 1000)
        is_accepted = False
    oracle, is_same = AutoTokenizer.from_pretrained(tmp_path), True
    for prompt in PROMPTS:
        ids = own.encode(prompt, add_special_tokens=True)
        is_same &= oracle(prompt)["input_ids"] == ids
        for skip in (True, False):
            is_same &= [oracle.decode(ids, skip_special_tokens=skip)] == own.decode([ids], skip)
    assert is_accepted == is_same
    # What transformers makes of it is in tokenizer.json once it saves it, if it can be.
    oracle.save_pretrained(tmp_path / "again")
    if name != "split":
        check_token_settings(saved(tmp_path / "again"))


def llama() -> Any:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "ab": 6, "▁ab": 7}
    return LlamaTokenizer(vocab=vocab, merges=[("a", "b"), ("▁", "ab")])


def qwen2() -> Any:
    return Qwen2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")])


def words() -> Any:
    backend = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")


@pytest.mark.parametrize("make", [llama, qwen2, words])
def test_what_transformers_saves_is_accepted(make: Any, tmp_path: Path) -> None:
    model = parse_config(raw_config())
    for round_trip in range(2):
        tokenizer = make() if round_trip == 0 else AutoTokenizer.from_pretrained(tmp_path / "0")
        tokenizer.save_pretrained(tmp_path / str(round_trip))
        check_texts(saved(tmp_path / str(round_trip)), model)
        tokenizer.add_tokens(["<think>", AddedToken("<q>", lstrip=True, normalized=True)])
        tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<call>", "<end of call>"]})
        tokenizer.save_pretrained(tmp_path / f"added {round_trip}")
        check_texts(saved(tmp_path / f"added {round_trip}"), model)


def test_what_transformers_4_saved_is_accepted() -> None:
    listed = [{"content": content, **flags} for content, flags in _flags(TOKENIZER).items()]
    config = {
        "added_tokens_decoder": {str(256 + position): token for position, token in enumerate(listed)},
        "additional_special_tokens": ["<tool>", "<end>"],
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "extra_special_tokens": {},
        "tokenizer_class": "PreTrainedTokenizer",
    }
    special = {**{key: value for key, value in NEW.items() if key != "special"}, "content": "<eos>"}
    older = {"eos_token": {"__type": "AddedToken", **special}, "unk_token": None}
    old_map = {"eos_token": special, "additional_special_tokens": ["<tool>", {**special, "content": "<end>"}]}
    for files in ((config, old_map), (older, old_map)):
        content = dict(zip(("tokenizer_config.json", "special_tokens_map.json"), files, strict=True))
        encoded = {name: json.dumps(value).encode() for name, value in content.items()}
        check_texts({"tokenizer.json": TOKENIZER, **encoded}, parse_config(raw_config()))


def _flags(data: bytes) -> dict[str, dict[str, bool]]:
    skipped = ("id", "content")
    added = json.loads(data)["added_tokens"]
    return {token["content"]: {key: value for key, value in token.items() if key not in skipped} for token in added}
