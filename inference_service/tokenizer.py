"""The base model's tokenizer, as its tokenizer.json describes it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import InvalidArgument

# Encoding a longer text takes about a millisecond, during which no other stream could be written.
_INLINE_CHARACTERS = 2000


class Tokenizer:
    """Text to token ids and back. `backend` is the `tokenizers` object that the detokenizer streams with."""

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer's post-processor adds, if wanted.

        Long texts are encoded on another thread.
        """
        if len(text) > _INLINE_CHARACTERS:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; an id that the tokenizer lacks has none."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself; part of a character shows as U+FFFD."""
        return [self.decode([token_id], skip_special_tokens=False) for token_id in ids]


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None without tokenizer.json (then only token ids are served).

    Raises:
        InvalidArgument: tokenizer.json is not one.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
        raise InvalidArgument.of("tokenizer.json", f"is not a tokenizer: {error!s:.200}") from error
