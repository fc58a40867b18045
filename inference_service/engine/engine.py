"""The engine: takes requests, steps, and says what came of each step to each API process. Torch-free itself."""

import logging
import uuid
from typing import Protocol

from inference_service.engine.blocks import chain_seed
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.sequence import Request, Sequence, check_spec
from inference_service.engine.step import Chunk, DeviceLost, Schedule, StepResult
from inference_service.types import (
    GenerateSpec,
    PromptLogprobs,
    RequestFailed,
    SequenceDelta,
    Started,
    StepOutput,
    TokenLogprobs,
)
from shared.errors import Internal, LoraplexError, RequestIdReused

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes a step."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    def execute(self, schedule: Schedule) -> StepResult:
        """Run a schedule that has chunks.

        Raises:
            DeviceLost: No later step can work.
        """


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
        self._outbox: dict[bytes, StepOutput] = {}
        self._num_received = 0
        self.is_computing = False  # whether the last step had anything to compute

    def step(self, now: float) -> dict[bytes, StepOutput]:
        """One forward pass at time `now`: what each API process (by name) should hear of it."""
        schedule = self.scheduler.schedule(now)
        self.is_computing = bool(schedule.chunks)
        result = self._run(schedule) if schedule.chunks else None
        self._postprocess(schedule, result, now)
        return self.take_output()

    def submit(self, client: bytes, spec: GenerateSpec) -> None:
        """Queue a request, or put out why not."""
        try:
            check_spec(spec, self.runner.vocab_size, self.scheduler.limits.max_model_len)
            if (client, spec.request_id) in self.scheduler.requests:
                raise RequestIdReused.of("request_id", "is in flight")
            seed = chain_seed(spec.tenant, self.weights_fingerprint, spec.adapter_digest, spec.cache_salt)
            self._num_received += 1
            self.scheduler.add(Request(spec, client, seed, self._num_received))
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

    def _run(self, schedule: Schedule) -> StepResult | None:
        """The forward pass; if it fails, its requests fail, all others go on and the result is None."""
        try:
            return self.runner.execute(schedule)
        except DeviceLost:
            raise
        except Exception:
            error = Internal(f"internal error (id {uuid.uuid4().hex})")
            log.exception("%s in a step of %d sequences", error.message, len(schedule.chunks))
            for request in dict.fromkeys(chunk.sequence.request for chunk in schedule.chunks):
                self._fail(request, error)
            return None

    def _postprocess(self, schedule: Schedule, result: StepResult | None, now: float) -> None:
        for failure in schedule.failed:
            self._put_failure(failure.request, failure.error)
        for request in schedule.started:
            self._output(request.client).started.append(_started(request, now))
        if result is None:
            return
        sampled = iter(zip(result.token_ids, result.logprobs, strict=True))
        for chunk, prompt_logprobs in zip(schedule.chunks, result.prompt_logprobs, strict=True):
            self._add_prompt_logprobs(chunk, prompt_logprobs)
            self.scheduler.advance(chunk)
            if chunk.samples:
                self._add_token(chunk.sequence, *next(sampled))

    def _add_prompt_logprobs(self, chunk: Chunk, entries: list[TokenLogprobs]) -> None:
        """Collect them over chunks; put them out when the prompt is complete."""
        request = chunk.sequence.request
        if not chunk.sequence.wants_prompt_logprobs or request.prompt_logprobs is None:
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
        reason, matched = sequence.finish_reason(self.runner.eos_ids, self.scheduler.limits.max_model_len)
        entries = None if request.spec.logprobs is None else [e for e in (logprobs,) if e is not None and tokens]
        delta = SequenceDelta(request.spec.request_id, sequence.index, tokens, entries, reason, matched)
        self._output(request.client).deltas.append(delta)
        if reason is not None:
            self.scheduler.finish(sequence)

    def _fail(self, request: Request, error: LoraplexError) -> None:
        self.scheduler.drop(request)
        self._put_failure(request, error)

    def _put_failure(self, request: Request, error: LoraplexError) -> None:
        self._output(request.client).failed.append(RequestFailed(request.spec.request_id, error.record()))

    def _output(self, client: bytes) -> StepOutput:
        return self._outbox.setdefault(client, StepOutput())


def _started(request: Request, now: float) -> Started:
    """Time in the queue is split into waiting for the adapter and the rest."""
    spec = request.spec
    waited = max(now - spec.arrival, 0.0)
    ready = request.adapter_ready_at
    for_adapter = (
        min(max(ready - spec.arrival, 0.0), waited) if request.waited_for_adapter and ready is not None else 0.0
    )
    cached = max(sequence.num_cached for sequence in request.sequences)
    return Started(spec.request_id, cached, waited - for_adapter, for_adapter)
