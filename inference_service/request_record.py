"""What is known of a Generate request when it has ended, refused ones included. Logs and traces are made of it."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference_service.answer import Admitted, Answer
from inference_service.request_checks import MAX_BLEND_PARTS, MAX_ID_CHARACTERS
from inference_service.request_stats import RequestMeter, StreamTimes
from loraplex.inference.v1 import inference_pb2 as pb
from shared.auth import caller_of
from shared.auth.gate import named_request_id
from shared.call_ends import cut_off_reason
from shared.errors import LoraplexError

log = logging.getLogger(__name__)

INTERNAL = "INTERNAL"
MAX_TEXT = 16_384  # characters of a prompt or an answer that are kept
# Requests are told of before they are checked: what callers wrote may be of any length.
MAX_NAME = 2048


Attributes = dict[str, str | bool | int | float | list[str]]
Phase = tuple[str, float, float, Attributes]  # name, start, end


class CallSpan(Protocol):
    """`shared.spans.CallSpan`, which is not imported unless there are traces."""

    @property
    def is_recording(self) -> bool: ...
    @property
    def trace_id(self) -> str: ...
    def annotate(self, attributes: Attributes, error: str = "") -> None: ...
    def add_children(self, phases: Iterable[Phase]) -> None: ...


@dataclass
class RequestRecord:
    """One request, as far as it came. Times are seconds of the monotonic clock.

    Attributes:
        model: Id of the base model.
        request_id: The caller's (field or header `x-request-id`), or one of ours.
        tenant: The caller's namespace.
        span: Of the call; None: nothing is traced.
        adapter_name: As the caller named it; empty: the base model.
        admitted: What the engine was asked; None: it was refused before.
        error: Reason of the error, also of one that cut it off; CANCELLED if the caller went; empty: it was answered.
        keeps_text: Whether prompt and answer are wanted.
        answers: Text by sequence, if so.
    """

    model: str
    request_id: str
    tenant: str
    request: pb.GenerateRequest
    arrival: float
    span: CallSpan | None = None
    ended: float = 0.0
    admitted: Admitted | None = None
    answer: Answer | None = None
    times: StreamTimes | None = None
    error: str = ""
    keeps_text: bool = False
    answers: dict[int, str] = field(default_factory=dict)

    @property
    def adapter_name(self) -> str:
        parts = self.request.blend[:MAX_BLEND_PARTS]
        return self.request.adapter[:MAX_NAME] or "+".join(f"{p.weight:g}*{p.reference}" for p in parts)[:MAX_NAME]

    @property
    def adapter_seconds(self) -> float:
        """That it waited for its adapter, as `Timings` tells its caller: for files and for a place on the device."""
        prepared = self.admitted.clock.prepare_seconds if self.admitted else 0.0
        return prepared + (self.times.started.adapter_seconds if self.times and self.times.started else 0.0)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the sequences that ended, in order."""
        return [s.finish.reason for s in self.answer.sequences if s.finish is not None] if self.answer else []

    @property
    def completion_tokens(self) -> int:
        """Of all sequences, as the caller got them."""
        return sum(sequence.num_tokens for sequence in self.answer.sequences) if self.answer else 0

    def admit(self, admitted: Admitted, answer: Answer, times: StreamTimes) -> None:
        """It goes to the engine."""
        self.admitted, self.answer, self.times = admitted, answer, times

    def said(self, response: pb.GenerateResponse) -> None:
        """The caller gets this. To be called if `keeps_text`."""
        if response.HasField("delta"):
            delta = response.delta
            self.answers[delta.index] = (self.answers.get(delta.index, "") + delta.text)[:MAX_TEXT]

    def messages(self) -> list[tuple[str, str]]:
        """(role, text) of the prompt, if it is text; as many messages as there is room for."""
        if self.request.HasField("text"):
            return [("user", self.request.text[:MAX_TEXT])]
        found, room = [], MAX_TEXT
        for message in self.request.chat.messages:
            if room <= 0:
                break
            found.append((message.role[:MAX_ID_CHARACTERS], message.content[:room]))
            room -= len(message.content) + 1
        return found


Reader = Callable[[RequestRecord], None]


class RequestJournal:
    """Keeps a record of every request while it runs, counts it, and hands it to the readers at its end.

    Args:
        model: Id of the base model.
        keeps_text: Whether any reader wants prompts and answers.
        span: The span of the call that the current task handles, if there is one.
    """

    def __init__(
        self,
        model: str,
        meter: RequestMeter,
        readers: Sequence[Reader] = (),
        *,
        keeps_text: bool = False,
        span: Callable[[], CallSpan | None] = lambda: None,
    ) -> None:
        self.meter = meter
        self._model = model
        self._readers = tuple(readers)
        self._keeps_text = keeps_text
        self._span = span

    def refused(self, rpc: str, request: Any, context: Any, error: LoraplexError) -> None:
        """A call that ended before its handler ran (`shared.auth.gate.Refusals`); only those of Generate are kept."""
        if rpc == "Generate":
            with suppress(LoraplexError), self.request(request, context, time.monotonic()):
                raise error

    @contextmanager
    def request(self, request: pb.GenerateRequest, context: Any, arrival: float) -> Iterator[RequestRecord]:
        """A request that came at `arrival`, until it ends, however that is."""
        request_id = request.request_id or named_request_id(context) or uuid.uuid4().hex
        tenant = caller_of(context).namespace
        record = RequestRecord(self._model, request_id[:MAX_ID_CHARACTERS], tenant, request, arrival, self._span())
        record.keeps_text = self._keeps_text
        record.error = INTERNAL
        try:
            yield record
            record.error = ""
        except LoraplexError as error:
            record.error = error.reason
            raise
        except (asyncio.CancelledError, GeneratorExit):
            record.error = cut_off_reason(context)
            raise
        finally:
            record.ended = time.monotonic()
            self.meter.ended(record.error)
            for read in self._readers:
                try:
                    read(record)
                except Exception:
                    log.exception("a request that has ended cannot be told of")
