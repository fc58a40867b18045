"""Token settings beside a tokenizer.json: those that transformers would change it by are refused, in every spelling."""

import json

import pytest

from shared.adapter_format.token_settings import check_token_settings
from shared.errors import AdapterInvalid

CONFIG, MAP, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"


def token(content, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


ADDED = [{"id": 5, **token("<a>")}, {"id": 6, **token("<b>", special=False, normalized=True)}]


def files(config=None, special_map=None, **tokenizer):
    model = {"type": "WordLevel", "vocab": {"word": 0}, "unk_token": "word"}
    content = {TOKENIZER: {"added_tokens": ADDED, "model": model, **tokenizer}, CONFIG: config, MAP: special_map}
    return {name: json.dumps(value).encode() for name, value in content.items() if value is not None}


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"eos_token": "<a>", "pad_token": None, "unk_token": "", "add_bos_token": True, "model_max_length": 3},
        {"eos_token": {"__type": "AddedToken", **token("<a>", lstrip=True)}},  # how it is found tokenizer.json says
        {"additional_special_tokens": ["<a>", {"content": "<b>"}], "image_token": "<b>"},
        {"extra_special_tokens": {}, "model_specific_special_tokens": {"image_token": "<a>"}},
        {"extra_special_tokens": None, "split_special_tokens": False},
        {"added_tokens_decoder": {"6": token("<a>"), "7": {"content": "<b>"}}},  # an id of no token, flags by default
        {"added_tokens_decoder": {}},
    ],
)
def test_files_that_agree(config):
    check_token_settings(files(config))
    check_token_settings(files(config, {"eos_token": {"content": "<a>"}, "additional_special_tokens": ["<b>"]}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"eos_token": "<new>"},
            'eos_token "<new>" is not among the added tokens of tokenizer.json, and transformers ',
        ),
        ({"pad_token": "word"}, 'pad_token "word" is not among'),  # a token; transformers would find it in words
        ({"unk_token": {"__type": "AddedToken", **token("<new>")}}, 'unk_token "<new>"'),
        ({"image_token": "<new>"}, 'image_token "<new>"'),
        ({"additional_special_tokens": ["<a>", "word"]}, 'additional_special_tokens "word"'),
        ({"additional_special_tokens": [{"content": "<new>"}]}, 'additional_special_tokens "<new>"'),
        ({"extra_special_tokens": ["<new>"]}, 'extra_special_tokens "<new>"'),
        ({"extra_special_tokens": {"image_token": "<new>"}}, 'extra_special_tokens "<new>"'),
        ({"model_specific_special_tokens": {"x": "<new>"}}, 'model_specific_special_tokens "<new>"'),
        ({"split_special_tokens": True}, "split_special_tokens is set"),
        ({"added_tokens_decoder": {"7": token("<new>")}}, 'added_tokens_decoder 7 is "<new>", which is not among'),
        ({"added_tokens_decoder": {"5": token("<a>", lstrip=True)}}, "with lstrip true; tokenizer.json says otherwise"),
        ({"added_tokens_decoder": {"5": token("<a>", special=False)}}, "with special false; tokenizer.json says other"),
        ({"added_tokens_decoder": {"5": "<a>"}}, "added_tokens_decoder lists no tokens"),
        ({"added_tokens_decoder": ["<a>"]}, "added_tokens_decoder lists no tokens"),
        ({"eos_token": "\ud800", "\ud800_token": "<a>"}, r'eos_token "\ud800"'),
        ({"\ud800_token": "<new>"}, r'"\ud800_token" "<new>"'),
    ],
)
def test_what_transformers_would_change_the_tokenizer_by_is_refused(config, said):
    with pytest.raises(AdapterInvalid) as caught:
        check_token_settings(files(config))
    assert caught.value.metadata == {"file": CONFIG}
    assert caught.value.message.startswith(f"{CONFIG}: ")
    assert said in caught.value.message
    assert "save" in caught.value.message.rpartition("; ")[2]
    caught.value.message.encode()


def test_the_map_counts_where_the_config_does_not_list_the_tokens():
    new = {"additional_special_tokens": ["<new>"]}
    for config in (None, {}):
        with pytest.raises(AdapterInvalid, match=r"special_tokens_map\.json: additional_special_tokens") as caught:
            check_token_settings(files(config, new))
        assert caught.value.metadata == {"file": MAP}
    check_token_settings(files({"added_tokens_decoder": {}}, new))


def test_the_token_of_its_padding_counts_where_no_other_is_named():
    padding = {"strategy": "BatchLongest", "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    with pytest.raises(AdapterInvalid, match=r"tokenizer\.json: padding's pad_token \"<pad>\" is not among"):
        check_token_settings(files({}, padding=padding))
    check_token_settings(files({"pad_token": "<a>"}, padding=padding))
    with pytest.raises(AdapterInvalid, match=r"tokenizer\.json: is not a tokenizer"):
        check_token_settings(files({}, padding=5))


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({"pad_token": "<b>", "eos_token": "<a>"}, {"<b>"}),
        ({"extra_special_tokens": {"image_token": "<b>"}}, {"<b>"}),
        ({"extra_special_tokens": ["<b>"], "pad_token": ""}, set()),
        ({"pad_token": "<b>", "added_tokens_decoder": {}}, set()),
        ({"pad_token": "<b>", "added_tokens_decoder": {"6": {"content": "<b>", "normalized": True}}}, {"<b>"}),
    ],
)
def test_a_token_with_a_name_is_special(config, special):
    assert check_token_settings(files(config)) == special


def test_without_a_tokenizer_there_is_nothing_to_change():
    check_token_settings({CONFIG: b'{"eos_token": "<new>", "split_special_tokens": true}'})
