"""What is refused of an adapter's tokenizer and chat template before it is registered, and what is said of the rest."""

import json

import pytest

from shared.adapter_format.text_checks import MAX_TEMPLATE_CHARS, check_texts
from shared.base_model import parse_config
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import RAW_MODEL

MODEL = parse_config({**RAW_MODEL, "eos_token_id": [31]})  # ids 0 to 31
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
JINJA, CONFIG, MAP, TOKENIZER = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)


def tokenizer(num_tokens=31, added=("</s>",), is_special=True):
    tokens = [{"id": num_tokens + i, "content": token, "special": is_special} for i, token in enumerate(added)]
    vocab = {f"t{i}": i for i in range(num_tokens)}
    return json.dumps({"added_tokens": tokens, "model": {"type": "BPE", "vocab": vocab, "merges": []}}).encode()


def config(**keys):
    return json.dumps(keys).encode()


def warnings(files, vocab_size=32):
    return check_texts(files, MODEL).warnings(vocab_size)


@pytest.mark.parametrize(
    ("files", "file", "problem"),
    [
        ({TOKENIZER: tokenizer()[:-1]}, TOKENIZER, "truncated"),
        ({TOKENIZER: b"<!DOCTYPE html><html>"}, TOKENIZER, "is a web page"),
        ({CONFIG: b'{"eos_token": '}, CONFIG, "is not JSON"),
        ({CONFIG: b"[]"}, CONFIG, "must be a JSON object"),
        ({CONFIG: b"version https://git-lfs.github.com/spec/v1\n"}, CONFIG, "is a Git LFS pointer"),
        ({CONFIG: config(chat_template="{{ messages[ }}")}, CONFIG, "the chat template is not a template"),
        ({CONFIG: config(chat_template="")}, CONFIG, "the chat template is empty"),
        ({CONFIG: config(chat_template={"default": LOOP})}, CONFIG, "must be a string or a list"),
        ({CONFIG: config(chat_template=[{"name": "default", "template": "{%"}])}, CONFIG, "is not a template"),
        ({MAP: b'"x"'}, MAP, "must be a JSON object"),
        ({CONFIG: config(eos_token=5)}, CONFIG, "eos_token is 5, which is no token's text; register the adapter with"),
        ({CONFIG: config(pad_token=False)}, CONFIG, "pad_token is false, which is no token's text"),
        ({CONFIG: config(bos_token={"content": 5})}, CONFIG, 'bos_token is {"content": 5}, which is no token\'s text'),
        ({CONFIG: b"{}", MAP: config(eos_token=["</s>"])}, MAP, "which is no token's text"),
        ({TOKENIZER: b"\xef\xbb\xbf" + tokenizer()}, TOKENIZER, "begins with a byte order mark"),
        (
            {TOKENIZER: tokenizer(), CONFIG: config(eos_token="<end>")},
            CONFIG,
            'eos_token "<end>" is not among the added',
        ),
        ({TOKENIZER: tokenizer(), CONFIG: config(eos_token="t3")}, CONFIG, 'eos_token "t3" is not among the added'),
        ({TOKENIZER: tokenizer(), MAP: config(pad_token="<pad>")}, MAP, 'pad_token "<pad>" is not among the added'),
        ({TOKENIZER: tokenizer(), CONFIG: config(split_special_tokens=True)}, CONFIG, "split_special_tokens is set"),
        ({JINJA: b"{% for m in messages %}"}, JINJA, "the chat template is not a template"),
        ({JINJA: b"{% for m in messages %}", CONFIG: config(chat_template=LOOP)}, JINJA, "is not a template"),
        ({JINJA: b"\n"}, JINJA, "the chat template is empty"),
        ({JINJA: b"\xff"}, JINJA, "cannot be read"),
        ({JINJA: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, JINJA, "is a Git LFS pointer"),
        ({JINJA: b"<!DOCTYPE HTML>\n<html>{{ messages }}"}, JINJA, "is a web page"),
    ],
)
def test_what_can_never_work_names_its_file(files, file, problem):
    with pytest.raises(AdapterInvalid, match=problem) as caught:
        check_texts(files, MODEL)
    assert caught.value.metadata == {"file": file}
    assert caught.value.message.startswith(f"{file}: ")
    assert "; " in caught.value.message


@pytest.mark.parametrize(
    "files",
    [
        {},
        {TOKENIZER: tokenizer(), CONFIG: config(eos_token="</s>", chat_template=LOOP), MAP: b"{}"},
        {TOKENIZER: tokenizer(), CONFIG: config(eos_token={"content": "</s>"})},
        {CONFIG: config(eos_token="</s>")},  # what the base model's tokenizer knows is not known here
        {JINJA: LOOP.encode(), CONFIG: config(chat_template="{% never read")},
        {JINJA: b"<|im_start|>{{ messages }}"},
        {CONFIG: config(pad_token=None, add_bos_token=True, image_token=5)},  # transformers reads seven by name
        {CONFIG: config(added_tokens_decoder={}), MAP: config(eos_token=5)},  # and this map not, where it is listed so
    ],
)
def test_what_works_is_not_doubted(files):
    assert warnings(files) == ()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({JINJA: b"You are a pirate."}, "chat_template.jinja: the chat template does not use `messages`"),
        ({CONFIG: config(chat_template=[{"name": "rag", "template": LOOP}])}, "chat_template names no `default`"),
        ({JINJA: b"{{ messages }}" + b" " * MAX_TEMPLATE_CHARS}, "was not looked into"),
        ({TOKENIZER: tokenizer(20)}, "has 21 tokens, the base model 32 ids; replicas refuse"),
        ({TOKENIZER: tokenizer(32, ())}, "id 31, which ends the base model's answers, is 't31', no special token,"),
        ({TOKENIZER: tokenizer(31, ())}, "id 31, which ends the base model's answers, is no token in"),
        ({TOKENIZER: tokenizer(31, ("</s>", "<pad>"))}, '"<pad>" has the id 32; with this adapter the model has 32'),
    ],
)
def test_doubts_are_said(files, said):
    (warning,) = warnings(files)
    assert said in warning


def test_ids_that_the_adapter_adds_are_its_tokens():
    files = {TOKENIZER: tokenizer(31, ("</s>", "<pad>", "<tool>"))}
    assert warnings(files, 34) == ()
    assert '"<tool>" has the id 33' in warnings(files, 33)[0]
