"""A line in the log for each Generate request that has ended, refused ones included."""

import logging
from typing import Any

from inference_service.request_record import RequestRecord

log = logging.getLogger("loraplex.requests")


def write_line(record: RequestRecord) -> None:
    """Writes a record down, without a word of prompt and answer unless it keeps them."""
    if not log.isEnabledFor(logging.INFO):
        return
    outcome = record.error or ",".join(dict.fromkeys(record.finish_reasons)) or "stop"
    log.info("Generate: %s", outcome, extra=_facts(record, outcome))


def _facts(record: RequestRecord, outcome: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "outcome": outcome,
        "total_seconds": _rounded(record.ended - record.arrival),
    }
    if record.adapter_name:
        facts["adapter"] = record.adapter_name
    if record.span is not None:
        facts["trace_id"] = record.span.trace_id
    if (admitted := record.admitted) is not None:
        if admitted.adapter is not None:
            facts |= {"adapter_version": admitted.adapter.version, "adapter_digest": admitted.adapter.digest}
        facts |= {
            "prompt_tokens": len(admitted.spec.prompt_ids),
            "completion_tokens": record.completion_tokens,
            "prepare_seconds": _rounded(admitted.clock.prepare_seconds),
        }
    if (times := record.times) is not None and (started := times.started) is not None:
        facts |= {
            "cached_tokens": started.cached_tokens,
            "queue_seconds": _rounded(started.queue_seconds),
            "adapter_seconds": _rounded(record.adapter_seconds),
        }
        if times.first is not None:
            facts["first_token_seconds"] = _rounded(times.first - record.arrival)
    if record.keeps_text:
        facts |= {"prompt": _prompt(record), "answers": list(record.answers.values())}
    return facts


def _prompt(record: RequestRecord) -> str | list[dict[str, str]]:
    """A text as it is, a chat as its messages; empty where the caller sent ids."""
    messages = record.messages()
    if record.request.HasField("chat"):
        return [{"role": role, "content": content} for role, content in messages]
    return messages[0][1] if messages else ""


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
