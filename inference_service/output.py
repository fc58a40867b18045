"""One output sequence as its reader sees it: text, ids and logprobs up to its end, and nothing beyond."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from inference_service.stop_strings import StopStrings
from inference_service.types import FinishReason, SequenceDelta, TokenLogprobs


class Finish(NamedTuple):
    """Why a sequence ended. The model's own end of sequence has neither a string nor a token."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token: int | None = None


@dataclass
class Piece:
    """What one delta adds. `text` may lag behind `token_ids` while characters or stop strings are undecided."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class TextStream(Protocol):
    """The growing text of one sequence; `detokenizer.Detokenizer` is one."""

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The text of what is held back."""
        ...


def text_ids(delta: SequenceDelta) -> list[int]:
    """The tokens of a delta that are part of the text: one that ends the sequence is not."""
    return delta.token_ids[:-1] if delta.finish_reason == "stop" else delta.token_ids


class OutputSequence:
    """Builds the text of one sequence and ends it at the first stop string.

    The token that completes a stop string counts and is reported; those after it appear nowhere. Tokens that end a
    sequence (end of sequence, stop ids) count and are reported, but are not part of the text. Without a detokenizer
    there is no text.
    """

    def __init__(self, detokenizer: TextStream | None, stop_strings: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_strings)
        self._surplus = Piece()  # tokens after an undecided candidate
        self.num_tokens = 0
        self.first_token_time: float | None = None
        self.finish: Finish | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish is not None

    def feed(self, delta: SequenceDelta, now: float) -> Piece:
        """Take the engine's delta, which arrived at `now`; returns what the reader gets of it."""
        piece = Piece()
        if delta.token_ids and self.first_token_time is None:
            self.first_token_time = now
        num_text = len(text_ids(delta))
        for position, token_id in enumerate(delta.token_ids):
            completions = self._stops.completions
            if position < num_text and self._detokenizer is not None:
                piece.text += self._stops.feed(self._detokenizer.feed(token_id))
            self._count(token_id, delta.logprobs[position] if delta.logprobs else None, completions, piece)
            if self._stops.matched is not None:
                break
        if self._stops.matched is None and delta.finish_reason is not None:
            completions = self._stops.completions
            piece.text += self._flush()
            piece.finish = Finish(delta.finish_reason, stop_token=delta.matched_token)
            if self._stops.matched is None or self._stops.completions != completions:
                _move(self._surplus, piece)
        if self._stops.matched is not None:
            piece.finish = Finish("stop", stop_string=self._stops.matched)
        self.finish = piece.finish
        self.num_tokens += len(piece.token_ids)
        return piece

    def _count(self, token_id: int, logprob: TokenLogprobs | None, completions: int, piece: Piece) -> None:
        """Report a token, unless a stop string was complete before it."""
        if self._stops.completions == completions and (self._stops.candidate or self._stops.matched) is not None:
            target = self._surplus
        else:
            _move(self._surplus, piece)
            target = piece
        target.token_ids.append(token_id)
        if logprob is not None:
            target.logprobs.append(logprob)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._stops.feed(self._detokenizer.flush())
        return text if self._stops.matched is not None else text + self._stops.flush()


def _move(source: Piece, target: Piece) -> None:
    target.token_ids.extend(source.token_ids)
    target.logprobs.extend(source.logprobs)
    source.token_ids, source.logprobs = [], []
