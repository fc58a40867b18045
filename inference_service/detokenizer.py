"""Token ids to text while they arrive, never splitting a character."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The growing text of one sequence. Special tokens have no text.

    `DecodeStream` holds a token back while its text ends in the middle of a character. What it holds is remembered
    here, so that `flush` can give it out when nothing follows. `backend` is the `tokenizers` object.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []  # tokens of the last text given out; decoders look at what comes before
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # DecodeStream gives up where a decoder rewrites text that was already given out
            return self.flush()
        if text is None:
            return ""
        self._context, self._held = self._held, []
        return str(text)

    def flush(self) -> str:
        """The text of what is held back, incomplete characters as U+FFFD. The sequence may go on after it."""
        if not self._held:
            return ""
        before = self._decode(self._context)
        after = self._decode([*self._context, *self._held])
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context, self._held = [], []
        return after.removeprefix(before) if after.startswith(before) else after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))
