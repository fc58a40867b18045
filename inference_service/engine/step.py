"""What one engine step consists of: the schedule, and what running it gave."""

from typing import NamedTuple

from inference_service.engine.sequence import Request, Sequence
from inference_service.types import TokenLogprobs
from shared.errors import LoraplexError


class Chunk(NamedTuple):
    """`length` tokens of `sequence` from position `start`. `samples`: they are its last known ones."""

    sequence: Sequence
    start: int
    length: int
    samples: bool

    @property
    def scored_positions(self) -> range:
        """Positions of this chunk whose logits predict a prompt token that is still without its wanted logprob."""
        sequence = self.sequence
        if not sequence.wants_prompt_logprobs:
            return range(0)
        done = len(sequence.request.prompt_logprobs or ())
        return range(max(self.start, done), min(self.start + self.length, sequence.num_prompt - 1))


class Failure(NamedTuple):
    request: Request
    error: LoraplexError


class Schedule(NamedTuple):
    """One step. The first `num_decodes` chunks are single tokens; both parts are sorted by adapter slot."""

    chunks: tuple[Chunk, ...]
    num_decodes: int
    started: tuple[Request, ...] = ()
    failed: tuple[Failure, ...] = ()


class StepResult(NamedTuple):
    """What a forward pass gave: one token for every chunk that samples, in order, with its logprobs where wanted;
    for every chunk, the logprobs of its `scored_positions`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]


class DeviceLost(Exception):
    """The device is unusable: this process must end and be started anew."""
