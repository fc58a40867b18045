"""Reads what replicas report."""

import re

from loraplex.registry.v1 import registry_pb2
from registry_service.checks import Checks, is_text
from registry_service.replicas import Report, ResidentState
from shared.digest import check_digest
from shared.errors import InvalidArgument
from shared.references import parse_base_model

MAX_RESIDENTS = 20_000
MAX_REASON_CHARS = 255
MAX_WRONG = 20  # entries that are complained of

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]{0,126}[A-Za-z0-9])?")
_LEVELS = {
    registry_pb2.ResidentState.LEVEL_DISK: "DISK",
    registry_pb2.ResidentState.LEVEL_HOST: "HOST",
    registry_pb2.ResidentState.LEVEL_GPU: "GPU",
    registry_pb2.ResidentState.LEVEL_FAILED: "FAILED",
}


def report(request: registry_pb2.ReportReplicaStateRequest) -> Report:
    """Every wrong field of a ReportReplicaState request at once, or the request."""
    checks = Checks()
    if not _NAME.fullmatch(request.replica):
        checks.wrong("replica", f"{request.replica!r:.100} is not 1 to 128 of A-Z a-z 0-9 . _ : -")
    base_model = checks.checked(lambda: parse_base_model(request.base_model, "base_model"), "")
    if request.observed_revision < 0:
        checks.wrong("observed_revision", "must not be negative")
    for field in ("resident", "removed"):
        if len(getattr(request, field)) > MAX_RESIDENTS:
            checks.wrong(field, f"must not be more than {MAX_RESIDENTS}")
    checks.finish()
    if request.full and request.removed:
        checks.wrong("removed", "must be empty with full")
    residents = _residents(request, checks)
    removed = _removed(request, checks)
    for digest in sorted(residents.keys() & removed)[:1]:
        checks.wrong("removed", f"{digest} is resident too")
    checks.finish()
    return Report(request.replica, base_model, request.observed_revision, request.full, residents, frozenset(removed))


def base_model_filter(text: str) -> str:
    """The base model whose replicas are listed; "" for all."""
    return parse_base_model(text, "base_model") if text else ""


def _residents(request: registry_pb2.ReportReplicaStateRequest, checks: Checks) -> dict[str, ResidentState]:
    found: dict[str, ResidentState] = {}
    for index, state in enumerate(request.resident):
        try:
            digest = check_digest(state.digest, f"resident[{index}].digest")
        except InvalidArgument as error:
            checks.violations.extend(error.violations)
            digest = ""
        if digest in found:
            checks.wrong(f"resident[{index}].digest", f"{digest} is there twice")
        if state.level not in _LEVELS:
            checks.wrong(f"resident[{index}].level", f"{state.level} is not a level")
        if not is_text(state.reason, MAX_REASON_CHARS):
            checks.wrong(f"resident[{index}].reason", f"must be printable, at most {MAX_REASON_CHARS} characters")
        if len(checks.violations) >= MAX_WRONG:
            break
        if digest and state.level in _LEVELS:
            found[digest] = ResidentState(digest, _LEVELS[state.level], state.pinned, state.reason)
    return found


def _removed(request: registry_pb2.ReportReplicaStateRequest, checks: Checks) -> set[str]:
    found: set[str] = set()
    for index, digest in enumerate(request.removed):
        if len(checks.violations) >= MAX_WRONG:
            break
        found.add(checks.checked(lambda i=index, d=digest: check_digest(d, f"removed[{i}]"), ""))  # type: ignore[misc]
    return found
