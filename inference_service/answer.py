"""One Generate stream: the engine's events in, the contract's messages out."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from inference_service import responses
from inference_service.adapter_text.text import OwnDetokenizer
from inference_service.output import OutputSequence, text_ids
from inference_service.responses import Clock
from inference_service.served_model import ServedModel
from inference_service.texts import RequestText
from inference_service.types import GenerateSpec, PreparedAdapter, PromptLogprobs, SequenceDelta, Started
from loraplex.inference.v1 import inference_pb2 as pb

Event = Started | PromptLogprobs | SequenceDelta


class Admitted(NamedTuple):
    """A request with all that its answer needs. `request_id` is the caller's; the engine knows `spec.request_id`."""

    request_id: str
    request: pb.GenerateRequest
    spec: GenerateSpec
    adapter: PreparedAdapter | None
    text: RequestText
    clock: Clock


class Answer:
    """`started`, prompt logprobs if asked for, then the sequences' deltas interleaved, each with its `finished`.

    `abort` ends a sequence in the engine (request id, index); it is called when a stop string has matched here.
    """

    def __init__(self, admitted: Admitted, model: ServedModel, abort: Callable[[str, int], None]) -> None:
        self._admitted = admitted
        self._model = model
        self._abort = abort
        strings, tokenizer = tuple(admitted.request.stop.strings), admitted.text.tokenizer
        detokenizers = [tokenizer.detokenizer() if tokenizer else None for _ in range(admitted.spec.sampling.n)]
        self.sequences = [OutputSequence(detokenizer, strings) for detokenizer in detokenizers]
        self._read_ahead = [d for d in detokenizers if isinstance(d, OwnDetokenizer)]  # all or none
        self._started = Started(admitted.spec.request_id, 0, 0.0, 0.0)

    @property
    def is_complete(self) -> bool:
        """Every sequence has ended."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def needs_reading(self) -> bool:
        """Whether `read` must see an event before `respond` does."""
        return bool(self._read_ahead)

    async def read(self, event: Event) -> None:
        """Fetch the text of an event's tokens from where the adapter's tokenizer runs. Raises AdapterInvalid."""
        if isinstance(event, SequenceDelta) and not self.sequences[event.index].is_finished:
            await self._read_ahead[event.index].read(text_ids(event), event.finish_reason is not None)

    def respond(self, event: Event) -> Iterator[pb.GenerateResponse]:
        """The messages that an event adds to the stream."""
        if isinstance(event, SequenceDelta):
            yield from self._advance(event)
        elif isinstance(event, Started):
            self._started = event
            admitted = self._admitted
            num_prompt = len(admitted.spec.prompt_ids)
            yield responses.started(admitted.request_id, self._model, admitted.adapter, num_prompt, event)
        else:
            yield responses.prompt_logprobs(event.tokens)

    def _advance(self, event: SequenceDelta) -> Iterator[pb.GenerateResponse]:
        sequence = self.sequences[event.index]
        if sequence.is_finished:
            return
        now = time.monotonic()
        piece = sequence.feed(event, now)
        if piece.finish is not None and event.finish_reason is None:
            self._abort(event.request_id, event.index)
        # Without a tokenizer the ids are all there is to send.
        with_token_ids = self._admitted.request.output.token_ids or self._admitted.text.tokenizer is None
        message = responses.delta(event.index, piece, with_token_ids=with_token_ids)
        if message is not None:
            yield message
        if piece.finish is not None:
            num_prompt, clock = len(self._admitted.spec.prompt_ids), self._admitted.clock
            yield responses.finished(event.index, piece.finish, sequence, num_prompt, self._started, clock, now)
