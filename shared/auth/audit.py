"""The audit log: a line for each change, who made it and what came of it. It never has a token or a secret."""

import logging
from typing import Any

from shared.auth.caller import Caller

log = logging.getLogger("loraplex.audit")
log.setLevel(logging.INFO)  # whatever else is logged


def record(
    caller: Caller, rpc: str, resource: str, *, outcome: str, request_id: str = "", revision: int = 0, version: str = ""
) -> None:
    """One change. `outcome` is OK or the error's reason; `revision` is the registry's, 0 where there is none."""
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
    log.info("%s %s: %s", rpc, resource, outcome, extra=facts)
