"""What one engine step consists of: the schedule, and what running it gave."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from inference_service.engine.sequence import Request, Sequence
from inference_service.types import TokenLogprobs
from shared.errors import LoraplexError


class Chunk(NamedTuple):
    """`length` tokens of `sequence` from position `start`.

    `samples`: they are its last ones, so the step samples the next. `scored_positions`: those whose logits predict a
    prompt token that is still without its wanted logprob.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scored_positions: range = range(0)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length


class AdapterRuns(NamedTuple):
    """The slot of each run of rows in a batch, −1 for the base model, and how many rows it has."""

    slots: list[int]
    lengths: list[int]


def adapter_runs(chunks: Iterable[Chunk]) -> AdapterRuns:
    """Of chunks in batch order: one run each, or two where the adapter acts from the middle of a chunk on."""
    runs = AdapterRuns([], [])
    for chunk in chunks:
        sequence, left = chunk.sequence, chunk.length
        without = min(max(sequence.request.spec.adapter_start - chunk.start, 0), left)
        if without:
            runs.slots.append(-1)
            runs.lengths.append(without)
            left -= without
        if left:
            runs.slots.append(sequence.slot)
            runs.lengths.append(left)
    return runs


class Failure(NamedTuple):
    request: Request
    error: LoraplexError


class Schedule(NamedTuple):
    """One step. The first `num_decodes` chunks are single tokens; both parts are sorted by adapter slot."""

    chunks: tuple[Chunk, ...]
    num_decodes: int
    started: tuple[Request, ...] = ()
    failed: tuple[Failure, ...] = ()


NOT_FINITE = -1  # stands for the token of a row whose logits overflowed


class StepResult(NamedTuple):
    """What a forward pass gave: one token (or NOT_FINITE) for every chunk that samples, in order, with its logprobs
    where wanted; for every chunk, the logprobs of its `scored_positions`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for it."""
        ...


class Computed(NamedTuple):
    """A step that was computed when it was launched."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class DeviceLost(Exception):
    """The device is unusable: this process must end and be started anew."""
