"""An adapter's own tokenizer, template and streams of text, as requests use them. All the work is the sandbox's."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inference_service.adapter_text.messages import (
    Decode,
    Encode,
    Encoded,
    Render,
    StreamState,
    StreamTokens,
    Texts,
)
from inference_service.adapter_text.sandbox import TextSandbox
from shared.adapter_format.texts import TOKENIZER

_PIECE_TOKENS = 4096  # decoded at a time


class Own(NamedTuple):
    """Whose text it is: the adapter's digest, and how many token ids the model has with it."""

    sandbox: TextSandbox
    digest: str
    vocab_size: int


class OwnTokenizer:
    """As `tokenizer.Tokenizer`. Every call raises AdapterInvalid where the tokenizer takes too much time or memory."""

    def __init__(self, own: Own, longest_token: int) -> None:
        self._own = own
        self.longest_token = longest_token

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        sandbox, digest, vocab_size = self._own
        request = Encode(digest, text, add_special_tokens)
        return (await sandbox.call(digest, vocab_size, request, Encoded, TOKENIZER)).token_ids

    async def decode_any(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of any number of ids."""
        (text,) = await self._decode([list(ids)], skip_special_tokens)
        return text

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself; part of a character shows as U+FFFD."""
        different = list(dict.fromkeys(ids))
        texts: list[str] = []
        for start in range(0, len(different), _PIECE_TOKENS):
            batch = [[token_id] for token_id in different[start : start + _PIECE_TOKENS]]
            texts += await self._decode(batch, skip_special_tokens=False)
        text_of = dict(zip(different, texts, strict=True))
        return [text_of[token_id] for token_id in ids]

    def detokenizer(self) -> "OwnDetokenizer":
        """For one sequence."""
        return OwnDetokenizer(self._own)

    async def _decode(self, batch: list[list[int]], skip_special_tokens: bool) -> list[str]:
        sandbox, digest, vocab_size = self._own
        request = Decode(digest, batch, skip_special_tokens)
        return (await sandbox.call(digest, vocab_size, request, Texts, TOKENIZER)).texts


class OwnTemplate:
    """As `chat_template.ChatTemplate`. `file`: the adapter's that holds it."""

    def __init__(self, own: Own, file: str) -> None:
        self._own = own
        self._file = file

    async def prompt(self, messages: Sequence[Mapping[str, str]], max_bytes: int) -> str:
        """The prompt for the assistant's next turn, of at most `max_bytes`.

        Raises:
            InvalidArgument: the template refuses these messages, or writes more.
            AdapterInvalid: it is no template, or takes too much time or memory.
        """
        sandbox, digest, vocab_size = self._own
        request = Render(digest, [dict(message) for message in messages], max_bytes)
        (text,) = (await sandbox.call(digest, vocab_size, request, Texts, self._file)).texts
        return text


class OwnDetokenizer:
    """As `detokenizer.Detokenizer`, but that the text of tokens is fetched (`read`) before they are fed."""

    def __init__(self, own: Own) -> None:
        self._own = own
        self._state = StreamState()
        self._texts: deque[str] = deque()
        self._rest = ""

    async def read(self, token_ids: Sequence[int], is_last: bool) -> None:
        """Fetch the text of what is fed next. `is_last`: and that of what is held back behind it."""
        sandbox, digest, vocab_size = self._own
        answer = await sandbox.advance(digest, vocab_size, StreamTokens(self._state, list(token_ids), is_last))
        self._texts.extend(answer.texts)
        self._state, self._rest = answer.state, answer.rest

    def feed(self, token_id: int) -> str:
        """The text that the token completes, which is the next of those that were read."""
        return self._texts.popleft()

    def flush(self) -> str:
        """The text of what is held back at the end."""
        rest, self._rest = self._rest, ""
        return rest
