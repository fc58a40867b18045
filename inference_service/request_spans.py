"""The spans of a Generate request: the call's own with what GenAI's conventions ask for, and where its time went."""

import json
from collections.abc import Iterator
from typing import Any

from inference_service.request_record import Attributes, Phase, RequestRecord
from inference_service.types import GenerateSpec

TOKENS = "loraplex.tokens"  # that a phase was about
# Attributes of requests by the field of Sampling that has them.
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


def add_spans(record: RequestRecord) -> None:
    """Adds to the span of a request's call, if it has one that is kept."""
    span = record.span
    if span is None or not span.is_recording:
        return
    span.annotate({**_request(record), **_response(record), **_text(record)}, record.error)
    span.add_children(_phases(record))


def operation_of(record: RequestRecord) -> str:
    """By GenAI's conventions."""
    return "chat" if record.request.HasField("chat") else "text_completion"


def _request(record: RequestRecord) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": operation_of(record),
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": record.adapter_name or record.model,
        "loraplex.base_model": record.model,
        "loraplex.tenant": record.tenant,
        "loraplex.request_id": record.request_id,
    }
    if record.admitted is not None:
        attributes |= _asked(record.admitted.spec)
    return attributes


def _asked(spec: GenerateSpec) -> Attributes:
    """What the engine was asked, defaults filled in."""
    attributes: Attributes = {name: getattr(spec.sampling, field) for field, name in _SAMPLING.items()}
    attributes |= {"gen_ai.request.max_tokens": spec.stop.max_tokens, "gen_ai.request.seed": spec.sampling.seed}
    if spec.sampling.top_k:
        attributes["gen_ai.request.top_k"] = spec.sampling.top_k
    if spec.sampling.n > 1:
        attributes["gen_ai.request.choice.count"] = spec.sampling.n
    return attributes


def _response(record: RequestRecord) -> Attributes:
    admitted = record.admitted
    if admitted is None:
        return {}
    attributes: Attributes = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.input_tokens": len(admitted.spec.prompt_ids),
        "gen_ai.usage.output_tokens": record.completion_tokens,
    }
    if admitted.adapter is not None:
        attributes["loraplex.adapter.digest"] = admitted.adapter.digest
        attributes["loraplex.adapter.tier"] = admitted.adapter.tier
        if admitted.adapter.version:
            attributes["gen_ai.response.model"] = attributes["loraplex.adapter.version"] = admitted.adapter.version
    if record.times is not None and (started := record.times.started) is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = started.cached_tokens
    return attributes


def _text(record: RequestRecord) -> Attributes:
    if not record.keeps_text:
        return {}
    asked = [_message(role, text) for role, text in record.messages()]
    said = [_message("assistant", text) for text in record.answers.values()]
    return {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps(said)}


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _phases(record: RequestRecord) -> Iterator[Phase]:
    """In the queue a request waits for its adapter first and for a seat then."""
    admitted, times = record.admitted, record.times
    if admitted is None or times is None:
        return
    prepared, submitted = record.arrival + admitted.clock.prepare_seconds, admitted.spec.arrival
    num_prompt = len(admitted.spec.prompt_ids)
    yield "tokenize", prepared, submitted, {TOKENS: num_prompt}
    if times.admitted is None or times.started is None:
        yield "queue", submitted, record.ended, {}
        return
    loaded = submitted + times.started.adapter_seconds
    if admitted.spec.adapter_digest is not None:
        yield "load adapter", submitted, loaded, {"loraplex.adapter.digest": admitted.spec.adapter_digest}
    yield "queue", loaded, times.admitted, {}
    computed = num_prompt - times.started.cached_tokens
    yield "prefill", times.admitted, times.first or record.ended, {TOKENS: computed}
    if times.first is not None:
        yield "decode", times.first, times.last, {TOKENS: record.completion_tokens}
