"""The engine: takes requests, steps, and says what came of each step to each API process. Torch-free itself."""

import logging
import uuid
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from inference_service.engine.blocks import chain_seed
from inference_service.engine.counters import EngineCounters
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.sequence import Request, Sequence, State, check_spec
from inference_service.engine.step import NOT_FINITE, Chunk, DeviceLost, PendingStep, Schedule, StepResult
from inference_service.lora.adapter import AdapterState
from inference_service.types import (
    GenerateSpec,
    PromptLogprobs,
    RequestFailed,
    SequenceDelta,
    Started,
    StepOutput,
    TokenLogprobs,
)
from shared.errors import AdapterInvalid, Internal, LoraplexError, RequestIdReused

log = logging.getLogger(__name__)

T = TypeVar("T")


class Launched(NamedTuple):
    """A step that has not been read yet. `pending` is None if there was nothing to compute, or it failed."""

    schedule: Schedule
    pending: PendingStep | None


class Runner(Protocol):
    """What computes a step."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    # Whether a step can be launched before the one before it has been read: the device then never waits for the host.
    looks_ahead: bool

    def launch(self, schedule: Schedule) -> PendingStep:
        """Run a schedule that has chunks.

        Raises:
            DeviceLost: No later step can work.
        """
        ...


class Engine:
    """One model on one device.

    Args:
        runner: Computes steps.
        scheduler: Decides them.
        weights_fingerprint: Of the base model, for the prefix cache.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, weights_fingerprint: str) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.weights_fingerprint = weights_fingerprint
        self.counters = EngineCounters()
        self._outbox: dict[bytes, StepOutput] = {}
        self._num_received = 0
        self._launched: Launched | None = None
        self.is_computing = False  # whether the last step had anything to compute

    def step(self, now: float) -> dict[bytes, StepOutput]:
        """One forward pass at time `now`: what each API process (by name) should hear of it."""
        schedule = self.scheduler.schedule(now)
        for failure in schedule.failed:  # at once: until the step is read, its client may be gone
            self._put_failure(failure.request, failure.error)
        pending = self._guard(schedule, lambda: self._launch(schedule)) if schedule.chunks else None
        self.is_computing = bool(schedule.chunks) or self._launched is not None
        self._complete_launched(now)
        self._launched = Launched(schedule, pending)
        if pending is None or not self.runner.looks_ahead:
            self._complete_launched(now)
        return self.take_output()

    def submit(self, client: bytes, spec: GenerateSpec) -> None:
        """Queue a request, or put out why not."""
        try:
            check_spec(spec, self.runner.vocab_size, self.scheduler.limits.max_model_len)
            if (client, spec.request_id) in self.scheduler.requests:
                raise RequestIdReused.of("request_id", "is in flight")
            fingerprint = self.weights_fingerprint
            seed = chain_seed(spec.tenant, fingerprint, spec.adapter_digest, spec.cache_salt, spec.adapter_start)
            self._num_received += 1
            self.scheduler.add(Request(spec, client, seed, self._num_received))
            self.counters.received(spec, self._adapter_state(spec))
        except LoraplexError as error:
            self._output(client).failed.append(RequestFailed(spec.request_id, error.record()))

    def abort(self, client: bytes, request_id: str, index: int | None = None) -> None:
        """Free what a request, or one of its sequences, holds."""
        self.scheduler.abort((client, request_id), index)

    def drop_client(self, client: bytes) -> None:
        """The API process is gone: free everything it asked for."""
        for request in [r for r in self.scheduler.requests.values() if r.client == client]:
            self.scheduler.drop(request)
        self._outbox.pop(client, None)

    def fail_adapter(self, digest: str, error: LoraplexError) -> None:
        """End every request that uses `digest`."""
        for request in [r for r in self.scheduler.requests.values() if r.spec.adapter_digest == digest]:
            self._fail(request, error)

    def take_output(self) -> dict[bytes, StepOutput]:
        """What there is to say since the last time, by API process."""
        output, self._outbox = self._outbox, {}
        return output

    # ---- one step's parts

    def _complete_launched(self, now: float) -> None:
        """Read the last launched step, if that has not been done."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        schedule, pending = launched
        result = None if pending is None else self._guard(schedule, pending.result)
        self._postprocess(schedule, result, now)

    def _launch(self, schedule: Schedule) -> PendingStep:
        """Start a step, whose slots are certainly still those of the adapters that its requests named."""
        for handle in {chunk.sequence.handle for chunk in schedule.chunks}:
            if handle is not None:
                self.scheduler.adapters.check(handle)
        return self.runner.launch(schedule)

    def _guard(self, schedule: Schedule, work: Callable[[], T]) -> T | None:
        """What `work` gives; if it fails, the requests of its step fail, all others go on and the result is None."""
        try:
            return work()
        except DeviceLost:
            raise
        except Exception:
            error = _internal()
            log.exception("%s in a step of %d sequences", error.message, len(schedule.chunks))
            for request in dict.fromkeys(chunk.sequence.request for chunk in schedule.chunks):
                self._fail(request, error)
            return None

    def _postprocess(self, schedule: Schedule, result: StepResult | None, now: float) -> None:
        for request in schedule.started:
            self.counters.started(request)
            self._output(request.client).started.append(_started(request, now))
        if result is None:
            return
        sampled = iter(zip(result.token_ids, result.logprobs, strict=True))
        for chunk, prompt_logprobs in zip(schedule.chunks, result.prompt_logprobs, strict=True):
            self._add_prompt_logprobs(chunk, prompt_logprobs)
            self.scheduler.advance(chunk)
            if chunk.samples:
                token, logprobs = next(sampled)
                if chunk.sequence.state is State.FINISHED:
                    continue
                if token == NOT_FINITE:
                    self._fail(chunk.sequence.request, _not_finite(chunk.sequence.request))
                else:
                    self._add_token(chunk.sequence, token, logprobs)

    def _add_prompt_logprobs(self, chunk: Chunk, entries: list[TokenLogprobs]) -> None:
        """Collect them over chunks; put them out when the prompt is complete."""
        request = chunk.sequence.request
        if request.prompt_logprobs is None or not request.live:
            return
        request.prompt_logprobs += entries
        if len(request.prompt_logprobs) == chunk.sequence.num_prompt - 1:
            done = PromptLogprobs(request.spec.request_id, request.prompt_logprobs)
            self._output(request.client).prompt_logprobs.append(done)
            request.prompt_logprobs = None

    def _add_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append the sampled token (none if the request only scores its prompt) and end the sequence if it must."""
        request = sequence.request
        scores_only = request.spec.stop.max_tokens == 0
        tokens = [] if scores_only else [token]
        sequence.token_ids += tokens
        self.counters.generated(request, len(tokens))
        reason, matched = sequence.finish_reason(self.runner.eos_ids, self.scheduler.limits.max_model_len)
        entries = None if request.spec.logprobs is None else [e for e in (logprobs,) if e is not None and tokens]
        delta = SequenceDelta(request.spec.request_id, sequence.index, tokens, entries, reason, matched)
        self._output(request.client).deltas.append(delta)
        if reason is not None:
            self.scheduler.finish(sequence)

    def _adapter_state(self, spec: GenerateSpec) -> AdapterState | None:
        return None if spec.adapter_digest is None else self.scheduler.adapters.state(spec.adapter_digest)

    def _fail(self, request: Request, error: LoraplexError) -> None:
        self.scheduler.drop(request)
        self._put_failure(request, error)

    def _put_failure(self, request: Request, error: LoraplexError) -> None:
        self._output(request.client).failed.append(RequestFailed(request.spec.request_id, error.record()))

    def _output(self, client: bytes) -> StepOutput:
        return self._outbox.setdefault(client, StepOutput())


_TOO_LARGE = (
    "its numbers overflow on this prompt: set lora_alpha as in training (in a blend, smaller weights), or register a "
    "checkpoint from before training diverged"
)


def _not_finite(request: Request) -> LoraplexError:
    """Why a request has no next token: an adapter's finite weights can still overflow."""
    digest = request.spec.adapter_digest
    if digest is not None:
        return AdapterInvalid(f"the adapter's output is not finite; {_TOO_LARGE}", metadata={"digest": digest})
    error = _internal()
    log.error("%s: the base model's output is not finite", error.message)
    return error


def _internal() -> Internal:
    """An error whose message the caller logs."""
    return Internal(f"internal error (id {uuid.uuid4().hex})")


def _started(request: Request, now: float) -> Started:
    """Time in the queue is split into waiting for the adapter and the rest."""
    spec = request.spec
    waited = max(now - spec.arrival, 0.0)
    for_adapter = min(max(request.adapter_ready_at - spec.arrival, 0.0), waited)
    cached = max(sequence.num_cached for sequence in request.sequences)
    return Started(spec.request_id, cached, waited - for_adapter, for_adapter)
