"""What can be known of an adapter's tokenizer and chat template without running them, and without the base model's."""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shared.adapter_format.mistaken import mistaken, mistaken_text
from shared.adapter_format.reasons import file_invalid
from shared.adapter_format.texts import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from shared.adapter_format.token_settings import check_token_settings
from shared.adapter_format.vocabulary import Vocabulary, beyond, read_vocabulary
from shared.base_model import ModelConfig
from shared.chat_template import parse_template, template_file, template_source
from shared.errors import AdapterInvalid, InvalidArgument
from shared.json_text import as_json

LEAVE_OUT = "register the adapter with a correct file, or without it for the base model's"
MAX_TEMPLATE_CHARS = 64 << 10  # a longer one is not parsed; those of known models have up to 20,000
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FEW = 0.9  # of the base model's ids: vocabularies are padded by less


class TextFacts(NamedTuple):
    """`doubts`: what may fail or be meant otherwise. `last_token`: the tokenizer's with the largest id, `last_id`."""

    doubts: tuple[str, ...] = ()
    last_id: int = -1
    last_token: str = ""

    def warnings(self, vocab_size: int) -> tuple[str, ...]:
        """All doubts, of a model that has `vocab_size` ids with the adapter."""
        if self.last_id < vocab_size:
            return self.doubts
        text = beyond(self.last_token, self.last_id, vocab_size)
        return (*self.doubts, f"{TOKENIZER}: {text}: replicas refuse it, unless it is the base model's tokenizer")


def check_texts(files: Mapping[str, bytes], model: ModelConfig) -> TextFacts:
    """Look at an adapter's text files, by name, without running any of them.

    Raises:
        AdapterInvalid: a file can never work (metadata `file`).
    """
    try:
        warnings = list(_template_warnings(files))
        _check_special_tokens(files)
    except InvalidArgument as error:
        raise of_file(error, files) from None
    vocabulary = read_vocabulary(files[TOKENIZER]) if TOKENIZER in files else None
    check_token_settings(files)
    if vocabulary is None:
        return TextFacts(tuple(warnings))
    warnings += _vocabulary_warnings(vocabulary, model)
    return TextFacts(tuple(warnings), *vocabulary.last())


def of_file(error: InvalidArgument, files: Mapping[str, bytes]) -> AdapterInvalid:
    """What `chat_template` says of a file of the adapter's, or of the template in one."""
    (violation,) = error.violations
    if violation.field not in files:
        return file_invalid(template_file(files), violation.description, LEAVE_OUT)
    wrong = mistaken(files[violation.field][:64], violation.field, is_json=violation.field.endswith(".json"))
    return wrong or file_invalid(violation.field, violation.description, LEAVE_OUT)


def _check_special_tokens(files: Mapping[str, bytes]) -> None:
    """What transformers cannot load: a special token that is no text. Those that it has no name for it lets be.

    Raises InvalidArgument naming the file.
    """
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    read = {TOKENIZER_CONFIG: config}
    if "added_tokens_decoder" not in config:  # as `special_tokens`
        read[SPECIAL_TOKENS] = json.loads(files.get(SPECIAL_TOKENS, b"{}"))
    for file, fields in read.items():
        for key in _SPECIAL_TOKENS:
            value = fields.get(key)
            text = value.get("content", "") if isinstance(value, dict) else value
            if text is not None and not isinstance(text, str):
                raise InvalidArgument.of(file, f"{key} is {as_json(value):.60}, which is no token's text")


def _template_warnings(files: Mapping[str, bytes]) -> Iterator[str]:
    source, file = template_source(files), template_file(files)
    if source is None:
        if b'"chat_template"' in files.get(TOKENIZER_CONFIG, b""):
            yield f"{TOKENIZER_CONFIG}: chat_template names no `default`: chats use the base model's template"
        return
    if wrong := mistaken_text(files.get(CHAT_TEMPLATE, b"")[:64], CHAT_TEMPLATE):
        raise wrong
    if len(source.text) > MAX_TEMPLATE_CHARS:
        yield f"{file}: the chat template is longer than {MAX_TEMPLATE_CHARS} characters and was not looked into"
        return
    syntax = parse_template(source.text)
    if syntax.never is not None:
        raise file_invalid(file, f"the chat template {syntax.never}", LEAVE_OUT)
    yield from (f"{file}: the chat template {doubt}" for doubt in syntax.doubts)


def _vocabulary_warnings(vocabulary: Vocabulary, model: ModelConfig) -> Iterator[str]:
    if vocabulary.num_tokens < _FEW * model.vocab_size:
        yield (
            f"{TOKENIZER} has {vocabulary.num_tokens} tokens, the base model {model.vocab_size} ids; replicas refuse a "
            "tokenizer that lacks a token of the base model's"
        )
        return
    for token_id in model.eos_token_ids:
        token = vocabulary.token(token_id)
        if token not in vocabulary.special:
            is_what = "no token" if token is None else f"{token[:60]!r}, no special token,"
            yield (
                f"id {token_id}, which ends the base model's answers, is {is_what} in {TOKENIZER}; replicas refuse a "
                "tokenizer that gives the base model's tokens other ids"
            )
