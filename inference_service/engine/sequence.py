"""A request and its sequences as the engine keeps them, torch-free."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from inference_service.engine.blocks import ChainSeed
from inference_service.lora.residents import Handle
from inference_service.types import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_OWN_EOS,
    MAX_STOP_TOKENS,
    FinishReason,
    GenerateSpec,
    TokenLogprobs,
)
from shared.errors import FieldViolation, InvalidArgument

if TYPE_CHECKING:
    from inference_service.engine.flows import Flow


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One Generate. The caller of `Scheduler.add` fills the first four fields, the scheduler and the engine the rest.

    Attributes:
        client: Name of the API process.
        cache_seed: Roots of its blocks' hash chain.
        order: Number of requests the engine received before it.
        sequences: One per index below `sampling.n`.
        flow: Its tenant's requests for the same adapter, from `Scheduler.add` on.
        adapter_ready_at: When its adapter was first seen READY, or -inf if it always was; set when it is admitted.
        started: Some sequence has been admitted.
        prompt_computed: The prompt's blocks can be found by its other sequences.
        prompt_logprobs: Positions 1… so far; None once sent.
        num_scored: Prompt positions whose logprobs launched steps compute or have computed.
    """

    spec: GenerateSpec
    client: bytes
    cache_seed: ChainSeed
    order: int
    sequences: list["Sequence"] = field(default_factory=list)
    flow: "Flow" = field(init=False)
    adapter_ready_at: float = -float("inf")
    started: bool = False
    prompt_computed: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_scored: int = 0

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, index, list(self.spec.prompt_ids)) for index in range(self.spec.sampling.n)]
        if self.spec.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def key(self) -> tuple[bytes, str]:
        return self.client, self.spec.request_id

    @property
    def live(self) -> list["Sequence"]:
        """Sequences that have not finished."""
        return [sequence for sequence in self.sequences if sequence.state is not State.FINISHED]

    @property
    def leader(self) -> "Sequence | None":
        """The sequence that computes the prompt for all."""
        return next((sequence for sequence in self.sequences if sequence.state is not State.FINISHED), None)


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of a request. Keys and values of its first `num_computed` tokens are in `blocks`, or on their way.

    Attributes:
        token_ids: Prompt and output; the engine appends.
        hashes: Names of the first full blocks, extended when needed.
        num_pending: Tokens that launched steps sample and nobody has read yet; they follow `token_ids`.
        num_cached: Tokens whose keys and values were found at admission. A recomputed one among them is not written.
        num_named: How many of `blocks` have been offered to the prefix cache.
        num_charged: Tokens that its tenant has been charged for; those computed again are not charged again.
        handle: Of its adapter while it runs; None for the base model.
    """

    request: Request
    index: int
    token_ids: list[int]
    num_prompt: int = 0
    num_pending: int = 0
    num_computed: int = 0
    num_cached: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    hashes: list[bytes] = field(default_factory=list)
    num_named: int = 0
    num_charged: int = 0
    handle: Handle | None = None
    state: State = State.WAITING

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def slot(self) -> int:
        """Its adapter's slot while it runs; -1 is the base model."""
        return -1 if self.handle is None else self.handle.slot

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_sampled(self) -> int:
        """Output tokens, those not yet read included."""
        return self.num_output + self.num_pending

    @property
    def position(self) -> int:
        """Output tokens before the one that its last launched step samples."""
        return self.num_sampled - 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those not yet read included."""
        return len(self.token_ids) + self.num_pending

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this sequence computes its request's prompt logprobs and they are not complete."""
        return self.request.prompt_logprobs is not None and self is self.request.leader

    def forbidden_ids(self, eos_ids: Items[int]) -> tuple[int, ...]:
        """Tokens that would end the sequence before `min_tokens`, where its last launched step samples."""
        stop = self.request.spec.stop
        if self.position >= stop.min_tokens:
            return ()
        return stop.token_ids if stop.ignore_eos else (*stop.token_ids, *eos_ids, *stop.eos_ids)

    def finish_reason(self, eos_ids: Items[int], max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Why the last output token ends the sequence, if it does, and the request's stop id that matched."""
        stop, token = self.request.spec.stop, self.token_ids[-1]
        if self.num_output and token in stop.token_ids:
            return "stop", token
        if self.num_output and not stop.ignore_eos and (token in eos_ids or token in stop.eos_ids):
            return "stop", None
        if self.num_output >= stop.max_tokens or len(self.token_ids) >= max_model_len:
            return "length", None
        return None, None


def check_spec(spec: GenerateSpec, vocab_size: int, max_model_len: int) -> None:
    """Refuse what the engine cannot compute. Ranges of sampling parameters are the API process's to check.

    Raises:
        InvalidArgument: for an empty or too long prompt, an unknown token id anywhere (before an adapter is activated,
            those that it adds are), n below 1, or more biases, stop and end-of-sequence ids, or alternatives than the
            engine keeps room for.
    """
    violations: list[FieldViolation] = []
    known_before = vocab_size
    vocab_size += spec.extra_vocab
    longest = max_model_len - (1 if spec.stop.max_tokens else 0)
    if not spec.prompt_ids:
        violations.append(FieldViolation("prompt", "must have at least one token"))
    elif len(spec.prompt_ids) > longest:
        text = f"has {len(spec.prompt_ids)} tokens, at most {longest} fit this server's context of {max_model_len}"
        violations.append(FieldViolation("prompt", text))
    elif min(spec.prompt_ids) < 0 or max(spec.prompt_ids) >= vocab_size:
        violations.append(FieldViolation("prompt.token_ids", f"ids must be from 0 to {vocab_size - 1}"))
    elif max(spec.prompt_ids[: spec.adapter_start], default=0) >= known_before:
        text = f"ids up to position {spec.adapter_start}, where the adapter is activated, must be below {known_before}"
        violations.append(FieldViolation("prompt.token_ids", text))
    if spec.sampling.n < 1:
        violations.append(FieldViolation("sampling.n", "must be at least 1"))
    if any(not 0 <= token < vocab_size for token in spec.sampling.logit_bias):
        violations.append(FieldViolation("sampling.logit_bias", f"ids must be from 0 to {vocab_size - 1}"))
    if any(not 0 <= token < vocab_size for token in spec.stop.token_ids):
        violations.append(FieldViolation("stop.token_ids", f"ids must be from 0 to {vocab_size - 1}"))
    if any(not 0 <= token < vocab_size for token in spec.stop.eos_ids):
        violations.append(FieldViolation("stop.eos_ids", f"ids must be from 0 to {vocab_size - 1}"))
    for field_name, count, most in (
        ("sampling.logit_bias", len(spec.sampling.logit_bias), MAX_LOGIT_BIASES),
        ("stop.token_ids", len(spec.stop.token_ids), MAX_STOP_TOKENS),
        ("stop.eos_ids", len(spec.stop.eos_ids), MAX_OWN_EOS),
        ("logprobs", spec.logprobs or 0, MAX_LOGPROBS),
        ("prompt_logprobs", spec.prompt_logprobs or 0, MAX_LOGPROBS),
    ):
        if count > most:
            violations.append(FieldViolation(field_name, f"is for {count}, at most {most} are possible"))
    if violations:
        raise InvalidArgument(violations)
