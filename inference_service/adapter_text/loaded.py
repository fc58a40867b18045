"""One adapter's tokenizer and chat template, as a text worker holds them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from inference_service.adapter_text.messages import Loaded, StreamState, StreamText, StreamTokens
from inference_service.chat_template import ChatTemplate, TemplateSource, special_tokens, template_source
from inference_service.tokenizer import longest_token
from shared.adapter_format.reasons import file_invalid
from shared.adapter_format.texts import CHAT_TEMPLATE, MAX_BYTES, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from shared.errors import AdapterInvalid, InvalidArgument
from shared.model_folder import read_files

_MOST_HELD = 32  # tokens without text; a character takes at most 4
_REPLACEMENT = "\ufffd"
_LEAVE_OUT = "register the adapter anew with a correct file, or without it for the base model's"


class BaseText(NamedTuple):
    """The base model's. None: there is none.

    `vocabulary`: token ids by token. `tokenizer`: what it does, see `_meaning`. `eos_token`: that its tokenizer names.
    """

    vocabulary: Mapping[str, int]
    tokenizer: str | None
    template: TemplateSource | None
    eos_token: str | None


def read_base_text(folder: Path) -> BaseText:
    """Of the base model's folder, which is trusted."""
    files = read_files(folder, MAX_BYTES)
    backend = _tokenizer(files[TOKENIZER]) if TOKENIZER in files else None
    vocabulary = backend.get_vocab(with_added_tokens=True) if backend is not None else {}
    meaning = None if backend is None else _meaning(backend)
    return BaseText(vocabulary, meaning, template_source(files), special_tokens(files).get("eos_token"))


class LoadedText:
    """What an adapter brings and the base model does not have.

    Raises:
        AdapterInvalid: a file is not what it should be, or contradicts the base model (metadata `file`).
    """

    def __init__(self, files: Mapping[str, bytes], base: BaseText, vocab_size: int) -> None:
        self._tokenizer: Any = None
        self._template: ChatTemplate | None = None
        vocabulary = base.vocabulary
        if TOKENIZER in files:
            backend = _tokenizer(files[TOKENIZER])
            if _meaning(backend) != base.tokenizer:
                vocabulary = backend.get_vocab(with_added_tokens=True)
                _check_vocabulary(vocabulary, base.vocabulary, vocab_size)
                self._tokenizer = backend
        try:
            source = template_source(files)
            if source is not None and source != base.template:
                tokens = source.special_tokens
                if not {TOKENIZER_CONFIG, SPECIAL_TOKENS} & files.keys() and base.template is not None:
                    tokens = base.template.special_tokens
                self._template = ChatTemplate(source.text, tokens)
            eos_token = special_tokens(files).get("eos_token")
        except InvalidArgument as error:
            raise _of_file(error, files) from None
        eos_id = None
        if eos_token is not None and eos_token != base.eos_token:
            eos_id = vocabulary.get(eos_token)
        self._eos_ids = (eos_id,) if eos_id is not None and eos_id < vocab_size else ()

    def facts(self) -> Loaded:
        """What an API process must know of it."""
        longest = longest_token(self._tokenizer) if self._tokenizer is not None else 0
        return Loaded(self._tokenizer is not None, self._template is not None, longest, self._eos_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation. Raises InvalidArgument if the template refuses it."""
        assert self._template is not None
        return self._template.render(messages)

    def decode(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids."""
        return [self._decode(ids, skip_special_tokens) for ids in batch]

    def advance(self, stream: StreamTokens) -> StreamText:
        """The text that each of a stream's next tokens completes; special ones have none.

        Decoders look at what comes before: so a token's text is what it adds to that of the tokens before it.
        """
        context, held = list(stream.state.context), list(stream.state.held)
        before = self._decode(context)
        texts = []
        for token_id in stream.token_ids:
            held.append(token_id)
            after = self._decode([*context, *held])
            text = _added(before, after)
            if text and (not text.endswith(_REPLACEMENT) or len(held) >= _MOST_HELD):
                texts.append(text)
                context, held = held, []
                before = self._decode(context)
            else:
                texts.append("")
        rest = _added(before, self._decode([*context, *held])) if stream.is_last and held else ""
        return StreamText(texts, StreamState(context, held), rest)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)) if ids else ""


def _added(before: str, after: str) -> str:
    return after.removeprefix(before) if after.startswith(before) else after[len(before) :]


def _of_file(error: InvalidArgument, files: Mapping[str, bytes]) -> AdapterInvalid:
    """What is wrong with a template or special tokens, as the fault of the file that has them."""
    (violation,) = error.violations
    if violation.field in files:
        return file_invalid(violation.field, violation.description, _LEAVE_OUT)
    return file_invalid(CHAT_TEMPLATE if CHAT_TEMPLATE in files else TOKENIZER_CONFIG, error.message, _LEAVE_OUT)


def _tokenizer(data: bytes) -> Any:
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
        raise file_invalid(TOKENIZER, f"is not a tokenizer: {error!s:.200}", _LEAVE_OUT) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _meaning(backend: Any) -> str:
    """A hash that tokenizers have in common which do the same, whatever saved them."""
    parts = json.loads(backend.to_str())
    after = parts.get("post_processor") or {}
    if after.get("type") == "TemplateProcessing" and not after["special_tokens"]:  # transformers writes it for none
        parts["post_processor"] = None
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _check_vocabulary(own: Mapping[str, int], base: Mapping[str, int], vocab_size: int) -> None:
    """The model was trained with the base model's ids: they must mean what they meant; further ones are the adapter's.

    Raises:
        AdapterInvalid: naming the first id that does not, or one that the model does not have.
    """
    wrong = min(((token_id, token) for token, token_id in base.items() if own.get(token) != token_id), default=None)
    if wrong is not None:
        token_id, token = wrong
        found = f"has the id {own[token]}" if token in own else "is missing"
        raise _contradiction(f"{_shown(token)} {found}; in the base model's vocabulary it is {token_id}", token_id)
    ids = set(base.values())
    for token, token_id in own.items():
        if token_id in ids and base.get(token) != token_id:
            raise _contradiction(f"id {token_id} is also {_shown(token)}, which the base model does not know", token_id)
        if token_id >= vocab_size:
            text = f"{_shown(token)} has the id {token_id}; with this adapter the model has {vocab_size} token ids"
            raise _contradiction(text, token_id)


def _contradiction(problem: str, token_id: int) -> AdapterInvalid:
    error = file_invalid(TOKENIZER, problem, "save the tokenizer that the adapter was trained with")
    error.metadata["token_id"] = str(token_id)
    return error


def _shown(token: str) -> str:
    return json.dumps(token[:60], ensure_ascii=False)
