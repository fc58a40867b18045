"""What the processes of one replica say to each other: msgspec structs, as msgpack on the wire.

    API process  ──Submit, Abort, LoadAdapter, …──▶  engine process  ──StepOutput, Reply──▶  API process
    API process  ──Prepare, ReadTexts, Resolve, …──▶  adapter process  ──Reply──▶  API process
    engine process  ──EngineStarted, Acquire, Release──▶  adapter process  ──Acquired, AcquireFailed──▶  engine process

Times are seconds of CLOCK_MONOTONIC, which all processes of one machine share.
"""

from typing import Literal, NamedTuple

import msgspec

from inference_service.stats import AdapterStats, EngineStats, Tier
from shared.digest import FileEntry
from shared.errors import ErrorRecord

FinishReason = Literal["stop", "length"]
PinOwner = Literal["operator", "registry"]

EXIT_CONFIG = 2  # exit code of a process that starting again cannot help
MAX_LOGPROBS = 20  # alternatives of one token
MAX_LOGIT_BIASES = 4096  # of one request; with the stop ids they size what a GPU engine keeps of a sequence
MAX_STOP_TOKENS = 256
READY_LINE = "ready"  # what a child process writes to standard output, for the supervisor, when its start is over
REPORT_PREFIX = "report "  # of a line that tells the supervisor what an API process has counted


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen. Defaults are those of the public contract."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    n: int = 1


class Stop(msgspec.Struct, frozen=True):
    """When the engine stops a sequence by itself. Stop strings belong to the API process."""

    max_tokens: int
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GenerateSpec(msgspec.Struct, frozen=True):
    """One request as the engine sees it.

    `logprobs`: number of top alternatives beside the chosen token, or None for no logprobs at all.
    `prompt_logprobs`: likewise for prompt positions 1…
    `tenant` and `cache_salt` seed the prefix cache together with the adapter's digest.
    `adapter_tier`: where the adapter process had the adapter when the request came.
    `adapter_start`: the first position of the prompt that the adapter acts on. `extra_vocab`: ids that it adds.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    stop: Stop
    adapter_digest: str | None = None
    tenant: str = "default"
    cache_salt: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    arrival: float = 0.0
    deadline: float | None = None
    adapter_tier: Tier = "host"
    adapter_start: int = 0
    extra_vocab: int = 0


# ---- API process → engine process


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
    """

    call_id: int
    digest: str
    pinned: bool
    wait: bool
    owner: PinOwner = "operator"


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


EngineRequest = Hello | Submit | Abort | LoadAdapter | UnloadAdapter | KeepPins | ListResident | GetStats | CancelCall


# ---- engine process → API process


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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-softmax of the raw float32 logits: the chosen token's, and the top alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
    pinned: bool
    active_requests: int


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Answer to the call with `call_id`, from the engine or from the adapter process.

    `digest` answers `Resolve`; `freed_bytes` answers `DropStaged`; `texts`, by file name, answers `ReadTexts`.
    """

    call_id: int
    error: ErrorRecord | None = None
    adapter: "PreparedAdapter | None" = None
    resident: list[ResidentAdapter] = []
    staged: "list[StagedAdapter]" = []
    digest: str = ""
    texts: dict[str, bytes] = {}
    freed_bytes: int = 0
    engine_stats: EngineStats | None = None
    adapter_stats: AdapterStats | None = None


EngineResponse = EngineReady | StepOutput | Reply


# ---- API process → adapter process


class PreparedAdapter(msgspec.Struct, frozen=True):
    """A resolved adapter whose verified files are on this machine. `version` is the full resource name.

    `tier`: where the adapter was when it was asked for. `texts`: the tokenizer and chat-template files that it brings
    (`ReadTexts`). `extra_vocab`: token ids beyond the base model's. `activation`: the tokens from whose last occurrence
    in the prompt on it acts; empty: everywhere. `parts`: what a blend consists of; it has no version of its own.
    """

    version: str
    digest: str
    rank: int
    size_bytes: int
    tier: Tier = "host"
    texts: tuple[FileEntry, ...] = ()
    extra_vocab: int = 0
    activation: tuple[int, ...] = ()
    parts: "tuple[BlendedPart, ...]" = ()


class BlendedPart(msgspec.Struct, frozen=True):
    """One adapter of a blend, as it was resolved. `version` is the full resource name."""

    version: str
    digest: str
    weight: float


class StagedAdapter(msgspec.Struct, frozen=True):
    """An adapter in the disk or host tier. `size_bytes`: of the files, or of the blob when in host memory.

    KNOWN: in neither, but resolved here before, so that it has a name.
    """

    version: str
    digest: str
    level: Literal["DISK", "HOST", "KNOWN"]
    rank: int
    size_bytes: int


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Resolve a reference and stage its files. `reference` is canonical (`shared.references`).

    `traceparent`: W3C context of the request that it is for, if that is traced.
    """

    call_id: int
    reference: str
    choice_key: str = ""
    traceparent: str = ""


class BlendPart(NamedTuple):
    """A canonical reference and how much of it."""

    reference: str
    weight: float


class PrepareBlend(msgspec.Struct, tag=True, frozen=True):
    """Resolve the parts and stage their weighted sum as an adapter of its own. Answered as `Prepare`."""

    call_id: int
    parts: tuple[BlendPart, ...]
    choice_key: str = ""
    traceparent: str = ""


class AwaitResidency(msgspec.Struct, tag=True, frozen=True):
    """Answered when the adapters that the registry wants here are here, at the latest after `seconds`."""

    call_id: int
    seconds: float


class ReadTexts(msgspec.Struct, tag=True, frozen=True):
    """The content of an adapter's `PreparedAdapter.texts`, verified; answered by `Reply.texts`."""

    call_id: int
    digest: str


class Resolve(msgspec.Struct, tag=True, frozen=True):
    """The digest that a canonical reference means, with nothing fetched."""

    call_id: int
    reference: str


class DropStaged(msgspec.Struct, tag=True, frozen=True):
    """Forget an adapter's blob in host memory (its files stay on disk); answered with the bytes that this frees."""

    call_id: int
    digest: str


class ListStaged(msgspec.Struct, tag=True, frozen=True):
    """What the disk and host tiers hold, and the names of `digests` that they do not hold.

    `names_only`: nothing but what is known of `digests`.
    """

    call_id: int
    digests: tuple[str, ...] = ()
    names_only: bool = False


# ---- engine process ↔ adapter process


class ModuleLayout(NamedTuple):
    """Where one module of one layer lies in an adapter's chunk for that layer.

    A is `[rank, in]` row-major; B is stored rank-major, `[rank, out]`. Offsets are bytes from the start of the
    chunk, multiples of 16. `module` indexes `shared.base_model.MODULES`. `scale` is α/r (or α/√r).
    """

    module: int
    rank: int
    scale: float
    a_offset: int
    b_offset: int


class ChunkLayout(NamedTuple):
    """One layer's part of an adapter's blob: `nbytes` from `offset` in the blob. Both are multiples of 16."""

    layer: int
    offset: int
    nbytes: int
    modules: tuple[ModuleLayout, ...]


class ExtraLayout(NamedTuple):
    """Where one tensor lies that an adapter has beside the A and B of its linears. Row-major, 16 bytes aligned.

    `gain`, `offset` [out] float32 of the linear `module` in `layer`: y = gain ⊙ (W x + b + scale · B(A x)) + offset.
    `input_layernorm` …, in place of that norm's weight in `layer`; `norm`: of the last one.
    `embed.a` [vocab + extra, rank], `embed.b` [rank, hidden], `embed.gain` [hidden];
    `head.a` [rank, hidden], `head.b` [rank, vocab + extra], `head.gain`, `head.offset` [vocab + extra];
    `embed.ids`, `head.ids` [n] int64, ascending, and `embed.rows`, `head.rows` [n, hidden]: in place of the base's.

    `layer`: OUTSIDE_LAYERS for what belongs to none. `module`: −1 except for gain and offset. `offset`: bytes from the
    start of the blob, within the chunk of `layer`; two tensors may be one. `scale`: of `embed.a` and `head.a`.
    """

    name: str
    layer: int
    module: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    scale: float = 0.0


OUTSIDE_LAYERS = -1


class BlobLayout(msgspec.Struct, frozen=True):
    """An adapter as it lies in the host arena and on the device. Layers that it does not change have no chunk; what it
    changes outside the layers is in a chunk of the layer OUTSIDE_LAYERS, the first.

    `extra_vocab`: token ids that it adds behind the base model's. `activation`: the tokens from whose last occurrence
    in the prompt on it acts; empty: everywhere.
    """

    nbytes: int
    rank: int
    dtype: str
    chunks: tuple[ChunkLayout, ...]
    extras: tuple[ExtraLayout, ...] = ()
    extra_vocab: int = 0
    activation: tuple[int, ...] = ()


class EngineStarted(msgspec.Struct, tag=True, frozen=True):
    """First message of an engine, and again when it learns that the adapter process was replaced: it holds no blob."""


class Acquire(msgspec.Struct, tag=True, frozen=True):
    """The engine wants the blob of `digest`; the adapter process holds it in the host arena until `Release`."""

    digest: str


class Release(msgspec.Struct, tag=True, frozen=True):
    digest: str


class Acquired(msgspec.Struct, tag=True, frozen=True):
    """`host_offset`: bytes from the start of the host arena, a multiple of 16."""

    digest: str
    host_offset: int
    layout: BlobLayout


class AcquireFailed(msgspec.Struct, tag=True, frozen=True):
    digest: str
    error: ErrorRecord


AdapterRequest = (
    Prepare
    | PrepareBlend
    | AwaitResidency
    | ReadTexts
    | Resolve
    | DropStaged
    | ListStaged
    | GetStats
    | EngineStarted
    | Acquire
    | Release
)
AdapterResponse = Reply | Acquired | AcquireFailed


def encode(message: msgspec.Struct) -> bytes:
    """`message` as msgpack."""
    return msgspec.msgpack.encode(message)


decode_engine_request = msgspec.msgpack.Decoder(EngineRequest).decode
decode_engine_response = msgspec.msgpack.Decoder(EngineResponse).decode
decode_adapter_request = msgspec.msgpack.Decoder(AdapterRequest).decode
decode_adapter_response = msgspec.msgpack.Decoder(AdapterResponse).decode
