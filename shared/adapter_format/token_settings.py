"""What tokenizer_config.json says of tokens, where transformers would change the tokenizer by it when it loads it.

transformers adds to a tokenizer.json each token that the files beside it name and that is not among its added tokens:
with a new id, or in one piece where it was a word like any other. Here tokenizer.json counts alone. As save_pretrained
writes the files, they agree; where they do not, the adapter was trained with other ids than it would be asked with.
"""

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import msgspec

from shared.adapter_format.reasons import COPY_AGAIN, file_invalid
from shared.adapter_format.texts import SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from shared.json_text import as_json

_SAVE = "load the tokenizer with transformers as in training and save it beside the adapter again, with save_pretrained"
_NOT_ADDED = f"is not among the added tokens of {TOKENIZER}, and transformers would add it"
_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


class _Flags(NamedTuple):
    """How text is searched for an added token, and whether the token is text itself."""

    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None

    @property
    def flags(self) -> _Flags:
        normalized = not self.special if self.normalized is None else self.normalized
        return _Flags(self.special, self.lstrip, self.rstrip, self.single_word, normalized)


class _Padding(msgspec.Struct):
    pad_token: str = ""


class _File(msgspec.Struct):
    """What of a tokenizer.json the settings must agree with. The rest is skipped: it takes no memory."""

    added_tokens: list[_AddedToken] = []
    padding: _Padding | None = None


_FILE = msgspec.json.Decoder(_File)


class _Mention(NamedTuple):
    """Where the files say that `token` is one. `is_name`: by giving it a name, as `eos_token`, not in a list."""

    file: str
    key: str
    token: str
    is_name: bool


def check_token_settings(files: Mapping[str, bytes]) -> Set[str]:
    """That transformers makes the token ids which the tokenizer.json in `files`, by name, says; none without one.

    The files must be JSON objects: it is not looked for what else may be wrong.

    Returns:
        Added tokens that are special to transformers, for they have a name, and not to tokenizer.json: no ids change.

    Raises:
        AdapterInvalid: it makes others; names the file and the key (metadata `file`).
    """
    if TOKENIZER not in files:
        return frozenset()
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if config.get("split_special_tokens"):
        problem = "split_special_tokens is set; here special tokens in a text are always tokens"
        raise file_invalid(TOKENIZER_CONFIG, problem, "train and save the tokenizer without it")
    own = _tokenizer(files[TOKENIZER])
    added = {token.content: token.flags for token in own.added_tokens}
    mentions = list(_mentions(files, config, own.padding))
    for file, key, token, _ in mentions:
        if token and token not in added:
            raise file_invalid(file, f"{_shown_key(key)} {as_json(token[:60])} {_NOT_ADDED}", _SAVE)
    listed = _check_listed(config.get("added_tokens_decoder"), added)
    named = {mention.token for mention in mentions if mention.is_name} - {""}
    return {token for token in named if not added[token].special and token in listed}


def _mentions(files: Mapping[str, bytes], config: Mapping[str, Any], padding: _Padding | None) -> Iterator[_Mention]:
    read = {TOKENIZER_CONFIG: config}
    if "added_tokens_decoder" not in config:  # as transformers does
        read[SPECIAL_TOKENS] = json.loads(files.get(SPECIAL_TOKENS, b"{}"))
    for file, fields in read.items():
        for key, value in fields.items():
            if key.endswith("_token") or key in _LISTS:
                is_name = key.endswith("_token") or isinstance(value, dict)
                yield from (_Mention(file, key, token, is_name) for token in _texts(value))
    if padding is not None and not any("pad_token" in fields for fields in read.values()):
        yield _Mention(TOKENIZER, "padding's pad_token", padding.pad_token, is_name=True)


def _texts(value: Any) -> Iterator[str]:
    """Of a token (a string, or an object with its `content`), or of each in a list or an object of them by name."""
    is_token = isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))
    if is_token:
        entries = [value]
    else:
        entries = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    texts = (entry.get("content") if isinstance(entry, dict) else entry for entry in entries)
    yield from (text for text in texts if isinstance(text, str))


def _check_listed(listed: Any, added: Mapping[str, _Flags]) -> Set[str]:
    """The tokens that tokenizer_config.json lists by id; without a list, all. The ids count as little as in
    transformers. Raises AdapterInvalid where tokenizer.json says otherwise."""
    if listed is None:
        return added.keys()
    key = "added_tokens_decoder"
    try:
        tokens = msgspec.convert(listed, dict[str, _AddedToken])
    except msgspec.ValidationError as error:
        raise file_invalid(TOKENIZER_CONFIG, f"{key} lists no tokens: {error!s:.200}", _SAVE) from None
    for token_id, token in tokens.items():
        place = f"{key} {token_id[:20]} is {as_json(token.content[:60])}"
        if token.content and token.content not in added:
            raise file_invalid(TOKENIZER_CONFIG, f"{place}, which {_NOT_ADDED}", _SAVE)
        if token.content and (flags := added[token.content]) != token.flags:
            name = next(name for name in _Flags._fields if getattr(flags, name) != getattr(token.flags, name))
            problem = f"{place} with {name} {as_json(getattr(token.flags, name))}; {TOKENIZER} says otherwise"
            raise file_invalid(TOKENIZER_CONFIG, problem, _SAVE)
    return {token.content for token in tokens.values()}


def _tokenizer(data: bytes) -> _File:
    try:
        return _FILE.decode(data)
    except msgspec.DecodeError as error:
        raise file_invalid(TOKENIZER, f"is not a tokenizer: {error!s:.200}", COPY_AGAIN) from None


def _shown_key(key: str) -> str:
    return key[:60] if key.isprintable() else as_json(key[:60])
