"""API process ↔ engine process; the adapter process calls the engine for residency as well."""

from typing import Literal

import msgspec

from inference_service.types.generation import FinishReason, GenerateSpec, TokenLogprobs
from shared.errors import ErrorRecord

PinOwner = Literal["operator", "registry"]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message of an API process; answered by `EngineReady` once the engine is warm."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    spec: GenerateSpec


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Free what the request holds. With `index`, only that sequence. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Bring an adapter into a slot; answered by `Reply` when it is READY (at once if not `wait`).

    `owner`: whose pin it is, if it is `pinned`. The registry's is that of an adapter's residency.
    `prepare_seconds`: as in `GenerateSpec`.
    """

    call_id: int
    digest: str
    pinned: bool
    wait: bool
    owner: PinOwner = "operator"
    prepare_seconds: float = 0.0


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Drain and free a slot; with `force` its sequences end with AdapterUnloaded. Answered by `Reply`."""

    call_id: int
    digest: str
    force: bool


class KeepPins(msgspec.Struct, tag=True, frozen=True):
    """The registry's pins are those of `digests` and no others; operators' pins stay. Answered by `Reply`."""

    call_id: int
    digests: tuple[str, ...]


class ListResident(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """How the engine, or the adapter process, is doing; answered by `Reply` at once."""

    call_id: int


class CancelCall(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for the `Reply` to this call any more. Unknown ones are ignored."""

    call_id: int


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine divides its device's memory, in bytes (`engine.memory`). On a CPU nothing is known of the whole.

    Attributes:
        total: What the device has; 0 on a CPU.
        other: Taken by other programs and the driver.
        weights: Of the base model.
        activations: Peak of a step of the largest size.
        reserve: For captured graphs and sampling.
        adapter_arena: For adapters.
        kv_cache: Keys and values of `num_blocks` blocks, and of a scratch block.
        host_arena: Host memory for packed adapters.
    """

    total: int = 0
    other: int = 0
    weights: int = 0
    activations: int = 0
    reserve: int = 0
    adapter_arena: int = 0
    kv_cache: int = 0
    num_blocks: int = 0
    host_arena: int = 0

    @property
    def unused(self) -> int:
        """What is left of the device."""
        taken = self.other + self.weights + self.activations + self.reserve + self.adapter_arena + self.kv_cache
        return max(self.total - taken, 0)


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """The engine is warm. What the API process must know of it."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    arena_bytes: int
    device: str
    dtype: str
    memory: MemoryBudget = MemoryBudget()


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The request was admitted for the first time."""

    request_id: str
    cached_tokens: int
    queue_seconds: float
    adapter_seconds: float


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Prompt positions 1… in order (position 0 has no distribution)."""

    request_id: str
    tokens: list[TokenLogprobs]


class SequenceDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence in one step. `matched_token`: the stop token id that ended it (also in token_ids)."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    matched_token: int | None = None


class RequestFailed(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    error: ErrorRecord


class StepOutput(msgspec.Struct, tag=True, frozen=True):
    """Everything one engine step has for one API process. Parts apply in field order."""

    started: list[Started] = []
    prompt_logprobs: list[PromptLogprobs] = []
    deltas: list[SequenceDelta] = []
    failed: list[RequestFailed] = []


class ResidentAdapter(msgspec.Struct, frozen=True):
    digest: str
    size_bytes: int
    rank: int
    pinned_by: tuple[PinOwner, ...]
    active_requests: int

    @property
    def pinned(self) -> bool:
        """Whether it stays, for whomever."""
        return bool(self.pinned_by)
