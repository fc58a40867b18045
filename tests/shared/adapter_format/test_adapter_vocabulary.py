"""Which tokens a tokenizer.json has, as the library finds them."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from shared.adapter_format import vocabulary
from shared.adapter_format.vocabulary import read_vocabulary
from shared.errors import AdapterInvalid

BY_TOKEN = {"a": 0, "b": 1, "ab": 2}
MODELS = {
    "BPE": lambda: models.BPE(BY_TOKEN, [("a", "b")]),
    "BPE with a gap": lambda: models.BPE({"a": 0, "b": 7}, []),
    "WordLevel": lambda: models.WordLevel(BY_TOKEN, unk_token="a"),
    "WordPiece": lambda: models.WordPiece(BY_TOKEN, unk_token="a"),
    "Unigram": lambda: models.Unigram([("a", -1.0), ("b", -2.5), (",", -3)], 0),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("added", [[], ["<x>"], ["a", "<x>", "b", "<y>"]])
def test_tokens_and_ids_are_the_librarys(model, added):
    backend = Tokenizer(MODELS[model]())
    backend.add_tokens([AddedToken(token, special=token.startswith("<")) for token in added])
    expected = backend.get_vocab(with_added_tokens=True)
    found = read_vocabulary(backend.to_str().encode())
    assert found.num_tokens == len(expected)
    assert found.special == {token for token in added if token.startswith("<")}
    assert all(found.token(token_id) == token for token, token_id in expected.items())
    assert found.token(99) is None
    assert found.last() == max((token_id, token) for token, token_id in expected.items())


def test_the_ids_that_a_file_gives_added_tokens_do_not_count():
    raw = json.loads(Tokenizer(models.BPE(BY_TOKEN, [])).to_str())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"] = [{"id": 50, "content": "<x>", **more}]
    backend = Tokenizer.from_str(json.dumps(raw))
    assert backend.token_to_id("<x>") == 3
    assert read_vocabulary(json.dumps(raw).encode()).last() == (3, "<x>")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'\xef\xbb\xbf{"model": {"vocab": {}}}',
        b'{"model": 1}',
        b'{"model": {"type": "Magic", "vocab": {}}}',
        b'{"model": {"vocab": {"a": -1}}}',
        b'{"model": {"vocab": {"a": "b"}}}',
        b'{"model": {"vocab": 5}}',
        b'{"model": {"vocab": [["a"]]}}',
        b'{"model": {"vocab": {"a": 0}, "merges": [}}',
        b'{"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]}',
        b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b', "model": {"vocab": {}}}',
    ],
)
def test_what_is_no_tokenizer_for_the_library_either(data):
    with pytest.raises(AdapterInvalid, match=r"is not a tokenizer|byte order mark") as caught:
        read_vocabulary(data)
    assert caught.value.metadata == {"file": "tokenizer.json"}
    with pytest.raises(ValueError, match="Cannot instantiate Tokenizer"):
        Tokenizer.from_buffer(data)


PAIRS = {"a": 0, "b": 1, "ab": 2, "##b": 3}


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"vocab": PAIRS, "merges": [["a", "b"]]}, None),
        ({"vocab": PAIRS, "merges": ["#version: 0.2", "a b"]}, None),
        ({"vocab": PAIRS, "merges": [["a", "##b"]], "continuing_subword_prefix": "##", "unk_id": "any"}, None),
        ({"vocab": PAIRS, "merges": [["a", "b"], ["a", "z"]]}, "merge 1 needs the token 'z', which the vocabulary"),
        ({"vocab": PAIRS, "merges": ["z b"]}, "merge 0 needs the token 'z'"),
        ({"vocab": PAIRS, "merges": [["b", "a"]]}, "merge 0 needs the token 'ba'"),
        ({"vocab": PAIRS, "merges": ["a b c"]}, "merge 0 is 'a b c', which is no pair of tokens"),
        ({"vocab": PAIRS, "merges": [["a", "b", "c"]]}, "is not a tokenizer"),
        ({"vocab": PAIRS, "merges": None}, "is not a tokenizer"),
        ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}, None),
        ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}, None),
        ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 1}, "unk_id is 1, which is none of its 1 tokens"),
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "z", "merges": [["a", "b"]]}, None),
    ],
)
def test_a_model_that_the_library_does_not_read_is_refused(model, problem):
    raw = json.loads(Tokenizer(MODELS["BPE"]()).to_str())
    raw["model"] = {"type": "BPE", "dropout": None, **model}
    data = json.dumps(raw).encode()
    if problem is None:
        Tokenizer.from_buffer(data)
        read_vocabulary(data)
        return
    with pytest.raises(ValueError, match="Cannot instantiate Tokenizer"):
        Tokenizer.from_buffer(data)
    with pytest.raises(AdapterInvalid, match=problem) as caught:
        read_vocabulary(data)
    assert caught.value.metadata == {"file": "tokenizer.json"}


def test_every_beginning_of_a_tokenizer_is_truncated():
    data = Tokenizer(MODELS["BPE"]()).to_str().encode()
    for length in range(len(data)):
        with pytest.raises(AdapterInvalid, match=r"tokenizer\.json: is not a tokenizer"):
            read_vocabulary(data[:length])


def test_a_pointer_in_its_place():
    with pytest.raises(AdapterInvalid, match=r"is a Git LFS pointer.*git lfs pull"):
        read_vocabulary(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def test_one_that_is_too_large_is_not_looked_into(monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_TOKENS", 2)
    assert read_vocabulary(b'{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}').num_tokens == 3
    assert read_vocabulary(b'{"model": {"vocab": {"a": 0, "b": 1, "c": 2, "d": 3}}}') is None
