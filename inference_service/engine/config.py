"""What the engine process is told when it starts."""

from typing import Literal

import msgspec

from shared.errors import InvalidArgument

Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["safetensors", "dummy"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DEFAULT_MODEL_LEN = 8192


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one engine. None means: chosen by the device or the model (`limits_for`).

    Attributes:
        model: Folder of config.json and the safetensors files.
        load_format: Where the weights come from; dummy: random ones of the config's shape, for benchmarks.
        weights_fingerprint: Identity of the base weights; part of every prefix cache name.
        max_model_len: Prompt and output tokens of one sequence; None for DEFAULT_MODEL_LEN. Less where the model or
            the KV cache takes less.
        max_num_seqs: Sequences in one step.
        max_batched_tokens: Tokens computed in one step; at least `max_num_seqs`.
        memory_fraction: Share of a GPU's memory that all of this engine fills; what sizes leave unsaid follows from it.
        kv_cache_bytes: Memory for keys and values.
        adapter_memory_bytes: The arena's byte budget.
        max_adapters: Slots.
        threads: torch's threads on a CPU.
        max_queue: Sequences that may wait before QueueFull.
        adapter_age_limit: Seconds after which an adapter that is waited for makes a resident one go.
        max_queued_per_tenant: Sequences of one tenant that may wait before TenantQuota; 0 for any number.
        max_running_per_tenant: Sequences of one tenant in a step; 0 for any number.
        adapter_bytes_per_tenant: Arena bytes that one tenant's adapters may take; 0 for all.
        seed: Of dummy weights.
    """

    model: str
    weights_fingerprint: str = ""
    load_format: LoadFormat = "safetensors"
    device: Device = "auto"
    dtype: DtypeName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    block_size: int = 16
    memory_fraction: float = 0.9
    kv_cache_bytes: int | None = None
    adapter_memory_bytes: int | None = None
    max_adapters: int = 128
    threads: int | None = None
    prefix_caching: bool = True
    seed: int = 0
    max_queue: int = 1024
    adapter_age_limit: float = 5.0
    max_queued_per_tenant: int = 0
    max_running_per_tenant: int = 0
    adapter_bytes_per_tenant: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_adapters", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive")
        for name in ("max_model_len", "max_num_seqs", "max_batched_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive")


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's numbers, all known. `max_model_len` also fits the KV cache."""

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    max_queue: int = 1024
    adapter_age_limit: float = 5.0
    max_queued_per_tenant: int = 0
    max_running_per_tenant: int = 0

    def __post_init__(self) -> None:
        if self.max_batched_tokens < self.max_num_seqs:
            text = f"must be at least max_num_seqs ({self.max_num_seqs}): every running sequence decodes in a step"
            raise InvalidArgument.of("max_batched_tokens", text)


def limits_for(config: EngineConfig, device: str, max_position: int, kv_tokens: int) -> EngineLimits:
    """The limits that `config` means on `device` for a model of `max_position` and a KV cache of `kv_tokens`."""
    cuda = device == "cuda"
    default_seqs = 256 if cuda else 64
    max_num_seqs = config.max_num_seqs or min(default_seqs, config.max_batched_tokens or default_seqs)
    return EngineLimits(
        max_model_len=min(config.max_model_len or DEFAULT_MODEL_LEN, max_position, kv_tokens),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=config.max_batched_tokens or max(8192 if cuda else 512, max_num_seqs),
        max_queue=config.max_queue,
        adapter_age_limit=config.adapter_age_limit,
        max_queued_per_tenant=config.max_queued_per_tenant,
        max_running_per_tenant=config.max_running_per_tenant,
    )


def model_len_line(config: EngineConfig, max_position: int, kv_tokens: int) -> tuple[str, bool]:
    """What `max_model_len` of `limits_for` has come to, for the log; and whether less than was asked for."""
    wanted = config.max_model_len or DEFAULT_MODEL_LEN
    takes = min((wanted, "max_model_len"), (max_position, "the model"), (kv_tokens, "the KV cache"), key=lambda t: t[0])
    is_cut = config.max_model_len is not None and takes[0] < config.max_model_len
    instead = f" instead of the {config.max_model_len} of max_model_len" if is_cut else ""
    return f"a sequence may have {takes[0]} tokens{instead}: as many as {takes[1]} allows", is_cut
