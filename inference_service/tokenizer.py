"""The base model's tokenizer, as its tokenizer.json describes it.

The library's batch calls let other threads run while they work; its calls for one text or token do not.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from inference_service.detokenizer import Detokenizer
from shared.adapter_format.texts import TOKENIZER
from shared.errors import InvalidArgument

T = TypeVar("T")

# Encoding a longer text takes about a millisecond, during which no other stream could be written.
_INLINE_CHARACTERS = 2000
_INLINE_TOKENS = 500
_THREADS = 2  # requests that are worked on off the event loop; further ones wait
_SHORTEST_BOUND = 64  # bytes of a token: normalizers may shorten a text a little


class Tokenizer:
    """Text to token ids and back. `backend` is the `tokenizers` object that the detokenizer streams with.

    `longest_token`: bytes of text that one token can stand for; a longer text than that for each has more tokens.
    """

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.longest_token = longest_token(backend)
        self._threads = ThreadPoolExecutor(_THREADS, "tokenizer")

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """`call` on one of the few threads for what takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer's post-processor adds, if wanted.

        Long texts are encoded on another thread.
        """
        if len(text) > _INLINE_CHARACTERS:
            return await self.in_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; an id that the tokenizer lacks has none. For few ids: others wait meanwhile."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    async def decode_any(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Likewise for any number of ids."""
        (text,) = await self._decode([list(ids)], len(ids), skip_special_tokens)
        return text

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself; part of a character shows as U+FFFD."""
        different = list(dict.fromkeys(ids))
        texts = await self._decode([[token_id] for token_id in different], len(different), False)
        text_of = dict(zip(different, texts, strict=True))
        return [text_of[token_id] for token_id in ids]

    def detokenizer(self) -> Detokenizer:
        """For one sequence."""
        return Detokenizer(self.backend)

    async def _decode(self, batch: list[list[int]], num_tokens: int, skip_special_tokens: bool) -> list[str]:
        decode = partial(self.backend.decode_batch, batch, skip_special_tokens=skip_special_tokens)
        texts: list[str] = await self.in_thread(decode) if num_tokens > _INLINE_TOKENS else decode()
        return texts


def longest_token(backend: Any) -> int:
    """See `Tokenizer`."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return max(max((len(token.encode()) for token in vocabulary), default=0), _SHORTEST_BOUND)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None without tokenizer.json (then only token ids are served).

    Raises:
        InvalidArgument: tokenizer.json is not one.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
        raise InvalidArgument.of(TOKENIZER, f"is not a tokenizer: {error!s:.200}") from error
