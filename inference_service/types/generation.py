"""A request as the engine sees it."""

from typing import Literal

import msgspec

from inference_service.stats import Tier

FinishReason = Literal["stop", "length"]
MAX_LOGPROBS = 20  # alternatives of one token
MAX_LOGIT_BIASES = 4096  # of one request; with the stop ids they size what a GPU engine keeps of a sequence
MAX_STOP_TOKENS = 256
MAX_OWN_EOS = 1  # end-of-sequence ids of an adapter's own, beside the base model's


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
    """When the engine stops a sequence by itself. Stop strings belong to the API process.

    `eos_ids`: the adapter's own end of sequence; they end it as the base model's do.
    """

    max_tokens: int
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    eos_ids: tuple[int, ...] = ()


class GenerateSpec(msgspec.Struct, frozen=True):
    """One request as the engine sees it.

    `logprobs`: number of top alternatives beside the chosen token, or None for no logprobs at all.
    `prompt_logprobs`: likewise for prompt positions 1…
    `tenant` and `cache_salt` seed the prefix cache together with the adapter's digest.
    `adapter_tier`: where the adapter process had the adapter when the request came.
    `prepare_seconds`: what it then took to resolve it and to have its files here, a part of the load that this begins.
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
    prepare_seconds: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-softmax of the raw float32 logits: the chosen token's, and the top alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
