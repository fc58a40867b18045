"""Label values that are known before anything has happened: their counters start at 0.

Prometheus sees no growth in a series that begins with its first event, so an alert on it would miss that one.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from shared.errors import BY_REASON

L = TypeVar("L", bound=tuple[str, ...])

_STAGE_REASONS = (
    "ADAPTER_INVALID",
    "ADAPTER_MEMORY",
    "ADAPTER_NOT_FOUND",
    "BASE_MODEL_CONFLICT",
    "BASE_MODEL_MISMATCH",
    "CREDENTIAL_NOT_ALLOWED",
    "DIGEST_MISMATCH",
    "INTERNAL",
    "REGISTRY_UNAVAILABLE",
    "SOURCE_FORBIDDEN",
    "SOURCE_NOT_FOUND",
    "SOURCE_UNAVAILABLE",
    "UNAVAILABLE",
    "UNSUPPORTED_ADAPTER",
)
_REQUEST_REASONS = (
    *_STAGE_REASONS,
    "ADAPTER_UNLOADED",
    "CANCELLED",
    "CLIENT_TOO_SLOW",
    "DEADLINE_UNREACHABLE",
    "DRAINING",
    "ENGINE_UNAVAILABLE",
    "INVALID_ARGUMENT",
    "PERMISSION_DENIED",
    "QUEUE_FULL",
    "RATE_LIMITED",
    "REQUEST_ID_REUSED",
    "TENANT_QUOTA",
)
_GENERATE_CODES = {"OK", "CANCELLED", "UNAUTHENTICATED", "UNKNOWN"} | {
    BY_REASON[reason].code for reason in _REQUEST_REASONS if reason in BY_REASON
}

STAGE_FAILURES = tuple((reason,) for reason in _STAGE_REASONS)
LOAD_FAILURES = (*STAGE_FAILURES, ("TENANT_QUOTA",))
REQUEST_ERRORS = tuple((reason,) for reason in sorted(_REQUEST_REASONS))
CALLS = tuple(("Generate", code) for code in sorted(_GENERATE_CODES))
FINISHED = (("abort",), ("error",), ("length",), ("stop",))
EVICTIONS = (("bytes",), ("slots",), ("unload",))
STAGE_EVICTIONS = (("disk",), ("host",))
RESTARTS = tuple((process, reason) for process in ("adapters", "api", "engine") for reason in ("end", "hang"))
TIERS = (("gpu",), ("host",), ("disk",), ("source",))


def from_zero(known: Iterable[L], counts: Mapping[L, int]) -> dict[L, int]:
    """`counts` by their label values, and 0 for each of `known` that has none."""
    return dict.fromkeys(known, 0) | dict(counts)
