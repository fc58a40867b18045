"""The audit log: a line for each change, who made it and what came of it. It never has a token or a secret."""

import logging
from typing import Any

from shared.auth.caller import Caller

log = logging.getLogger("loraplex.audit")
log.setLevel(logging.INFO)  # whatever else is logged


MAX_CHANGE_CHARS = 500


def record(
    caller: Caller,
    rpc: str,
    resource: str,
    *,
    outcome: str,
    request_id: str = "",
    revision: int = 0,
    version: str = "",
    change: str = "",
) -> None:
    """One change. `outcome` is OK or the error's reason; `revision` is the registry's, 0 where there is none; `change`
    says what was to become of the resource where `rpc` does not."""
    facts: dict[str, Any] = {
        "subject": caller.name,
        "credential": caller.credential,
        "rpc": rpc,
        "resource": resource,
        "request_id": request_id,
        "outcome": outcome,
    }
    if revision:
        facts["revision"] = revision
    if version:
        facts["version"] = version
    if change:
        facts["change"] = change
    log.info("%s %s: %s", rpc, resource, outcome, extra=facts)


def change_of(request: Any) -> str:
    """What a request wants, by names and numbers only: values that a caller wrote may be anybody's secret."""
    parts = [
        f"{target.version}:{target.weight:g}" if target.HasField("weight") else str(target.version)
        for target in _of(request, "targets")
    ]
    if aliases := _of(request, "aliases"):
        parts.append(f"aliases {', '.join(aliases)}")
    if mask := getattr(request, "update_mask", None):
        parts.append(f"fields {', '.join(mask.paths) or 'that are set'}")
    return " ".join(parts)[:MAX_CHANGE_CHARS]


def _of(request: Any, field: str) -> Any:
    return getattr(request, field, ())
