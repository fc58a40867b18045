"""Turns a checked GenerateRequest into what the engine understands.

Unset is not zero: optional fields that are unset take the contract's defaults.
"""

import secrets
from collections.abc import Sequence

from google.protobuf.message import Message

from inference_service.types import EngineReady, GenerateSpec, PreparedAdapter, Sampling, Stop
from loraplex.inference.v1 import inference_pb2 as pb

# Below this, logits / temperature may overflow float32, and the most likely token is certain anyway.
GREEDY_BELOW = 1e-5


def _or(message: Message, field: str, default: float) -> float:
    return float(getattr(message, field)) if message.HasField(field) else default


def _or_none(message: Message, field: str) -> int | None:
    return int(getattr(message, field)) if message.HasField(field) else None


def sampling_of(sampling: pb.Sampling) -> Sampling:
    """A checked Sampling with the contract's defaults filled in, and a random seed if it has none."""
    temperature = _or(sampling, "temperature", 1.0)
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=_or(sampling, "top_p", 1.0),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(62),
        repetition_penalty=_or(sampling, "repetition_penalty", 1.0),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        n=sampling.n if sampling.HasField("n") else 1,
    )


def stop_of(stop: pb.Stop, room: int, eos_ids: tuple[int, ...]) -> Stop:
    """A checked Stop. `room`: tokens to the end of the context, which bounds max_tokens."""
    max_tokens = min(stop.max_tokens, room) if stop.HasField("max_tokens") else room
    return Stop(
        max_tokens=max_tokens,
        min_tokens=min(stop.min_tokens, max_tokens),
        token_ids=tuple(dict.fromkeys(stop.token_ids)),
        ignore_eos=stop.ignore_eos,
        eos_ids=eos_ids,
    )


def activation_start(prompt_ids: Sequence[int], activation: tuple[int, ...]) -> int | None:
    """The position from which on an adapter acts: where the last occurrence of `activation` begins.

    Without any `activation` it acts everywhere; None if the prompt does not have it.
    """
    if not activation:
        return 0
    length = len(activation)
    for start in range(len(prompt_ids) - length, -1, -1):
        if prompt_ids[start] == activation[0] and tuple(prompt_ids[start : start + length]) == activation:
            return start
    return None


def generate_spec(
    request: pb.GenerateRequest,
    prompt_ids: Sequence[int],
    ready: EngineReady,
    *,
    engine_id: str,
    tenant: str,
    adapter: PreparedAdapter | None,
    eos_ids: tuple[int, ...],
    arrival: float,
    deadline: float | None,
    prepare_seconds: float,
) -> GenerateSpec:
    """The engine's view of a checked request. `engine_id` is unique, which a caller's request_id need not be.
    `eos_ids`: of its text (`texts.RequestText`).

    An adapter that the prompt does not activate changes nothing: then it is the base model's request.
    """
    prompt_ids = list(prompt_ids)
    start = activation_start(prompt_ids, adapter.activation) if adapter is not None else 0
    acting = adapter if start is not None else None
    return GenerateSpec(
        request_id=engine_id,
        prompt_ids=prompt_ids,
        sampling=sampling_of(request.sampling),
        stop=stop_of(request.stop, ready.max_model_len - len(prompt_ids), eos_ids),
        adapter_digest=acting.digest if acting is not None else None,
        adapter_tier=acting.tier if acting is not None else "host",
        adapter_start=start or 0,
        extra_vocab=acting.extra_vocab if acting is not None else 0,
        tenant=tenant,
        cache_salt=request.cache_salt,
        priority=request.priority,
        logprobs=_or_none(request.output, "logprobs"),
        prompt_logprobs=_or_none(request.output, "prompt_logprobs"),
        arrival=arrival,
        deadline=deadline,
        prepare_seconds=prepare_seconds if acting is not None else 0.0,
    )
