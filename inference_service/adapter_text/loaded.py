"""One adapter's tokenizer and chat template, as a text worker holds them."""

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from inference_service.adapter_text.messages import Loaded, StreamState, StreamText, StreamTokens
from inference_service.chat_template import ChatTemplate
from inference_service.tokenizer import longest_token
from shared.adapter_format.reasons import file_invalid
from shared.adapter_format.text_checks import LEAVE_OUT, of_file
from shared.adapter_format.texts import MAX_BYTES, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from shared.adapter_format.token_settings import check_token_settings
from shared.adapter_format.vocabulary import SAVE_TOKENIZER, check_vocabulary, no_id_of_model
from shared.chat_template import TemplateSource, special_tokens, template_file, template_source
from shared.errors import InvalidArgument
from shared.model_folder import read_files

_MOST_HELD = 32  # tokens without text; a character takes at most 4
_REPLACEMENT = "\ufffd"


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
    """What an adapter brings and the base model does not have. Its template is not compiled until `compile`.

    Raises:
        AdapterInvalid: a file is not what it should be, or contradicts the base model (metadata `file`).
    """

    def __init__(self, files: Mapping[str, bytes], base: BaseText, vocab_size: int) -> None:
        self._tokenizer: Any = None
        self._source: TemplateSource | None = None
        self._template: ChatTemplate | None = None
        self._template_file = ""
        self._vocab_size = vocab_size
        vocabulary = base.vocabulary
        if TOKENIZER in files:
            backend = _tokenizer(files[TOKENIZER])
            if _meaning(backend) != base.tokenizer:
                vocabulary = backend.get_vocab(with_added_tokens=True)
                check_vocabulary(vocabulary, base.vocabulary, vocab_size)
                self._tokenizer = backend
        try:
            source = template_source(files)
            if source is not None and source != base.template:
                tokens = source.special_tokens
                if not {TOKENIZER_CONFIG, SPECIAL_TOKENS} & files.keys() and base.template is not None:
                    tokens = base.template.special_tokens
                self._source, self._template_file = TemplateSource(source.text, tokens), template_file(files)
            named = check_token_settings(files)
            if self._tokenizer is not None:
                _make_special(self._tokenizer, named)
            eos_token = special_tokens(files).get("eos_token")
        except InvalidArgument as error:
            raise of_file(error, files) from None
        eos_id = None
        if eos_token is not None and eos_token != base.eos_token:
            eos_id = vocabulary.get(eos_token)
        self._eos_ids = (eos_id,) if eos_id is not None and eos_id < vocab_size else ()

    def facts(self) -> Loaded:
        """What an API process must know of it."""
        longest = longest_token(self._tokenizer) if self._tokenizer is not None else 0
        return Loaded(self._tokenizer is not None, self._template_file, longest, self._eos_ids)

    def compile(self) -> None:
        """Make the template ready to render. Raises AdapterInvalid if it is none (metadata `file`)."""
        assert self._source is not None
        try:
            self._template = ChatTemplate(self._source.text, self._source.special_tokens)
        except InvalidArgument as error:
            problem = f"the chat template {error.violations[0].description}"
            raise file_invalid(self._template_file, problem, LEAVE_OUT) from None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises AdapterInvalid if one is none of the model's."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = list(encoding.ids)
        if (largest := max(ids, default=0)) >= self._vocab_size:  # no token's: the vocabulary was checked
            problem = f"its post_processor adds the id {largest}; {no_id_of_model(self._vocab_size)}"
            raise file_invalid(TOKENIZER, problem, SAVE_TOKENIZER)
        return ids

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation, once compiled. Raises InvalidArgument if the template refuses it."""
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


def _tokenizer(data: bytes) -> Any:
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
        raise file_invalid(TOKENIZER, f"is not a tokenizer: {error!s:.200}", LEAVE_OUT) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _make_special(backend: Any, tokens: Set[str]) -> None:
    """As transformers does: added tokens with a name have no text where special ones have none."""
    found = [token for token in backend.get_added_tokens_decoder().values() if token.content in tokens]
    for token in found:
        token.special = True
    backend.add_tokens(found)


def _meaning(backend: Any) -> str:
    """A hash that tokenizers have in common which do the same, whatever saved them."""
    parts = json.loads(backend.to_str())
    after = parts.get("post_processor") or {}
    if after.get("type") == "TemplateProcessing" and not after["special_tokens"]:  # transformers writes it for none
        parts["post_processor"] = None
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
