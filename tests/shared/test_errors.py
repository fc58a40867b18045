"""Which errors a retry may help with: of every reason, on the wire and in the page of errors."""

import re
from pathlib import Path

import pytest
from google.rpc import error_details_pb2, status_pb2

from shared.errors import BY_REASON, ErrorRecord, SourceForbidden, from_record
from shared.status import to_grpc_status

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ALWAYS = {"UNAVAILABLE", "SOURCE_UNAVAILABLE", "REGISTRY_UNAVAILABLE", "ENGINE_UNAVAILABLE", "DRAINING"}
SOMETIMES = {
    "QUEUE_FULL", "TENANT_QUOTA", "RATE_LIMITED", "ADAPTER_MEMORY", "WATCH_TOO_SLOW", "DEADLINE_UNREACHABLE",
}  # fmt: skip
NEVER = {
    "INVALID_ARGUMENT", "REQUEST_ID_REUSED", "NOT_FOUND", "ADAPTER_NOT_FOUND", "BASE_MODEL_NOT_FOUND",
    "FAILED_PRECONDITION", "BASE_MODEL_UNKNOWN", "BASE_MODEL_MISMATCH", "BASE_MODEL_CONFLICT", "ADAPTER_INVALID",
    "UNSUPPORTED_ADAPTER", "SOURCE_NOT_FOUND", "SOURCE_FORBIDDEN", "CREDENTIAL_NOT_ALLOWED", "VERSION_IN_USE",
    "ADAPTER_DELETED", "ETAG_MISMATCH", "ADAPTER_UNLOADED", "WATCH_COMPACTED", "DIGEST_MISMATCH", "UNAUTHENTICATED",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "CLIENT_TOO_SLOW", "NAMESPACE_QUOTA", "UNIMPLEMENTED", "INTERNAL",
}  # fmt: skip


def retry_info(record: ErrorRecord) -> float | None:
    """Seconds that the error's status tells its caller to wait."""
    ((_, value),) = to_grpc_status(from_record(record)).trailing_metadata
    found = error_details_pb2.RetryInfo()
    is_there = any(detail.Unpack(found) for detail in status_pb2.Status.FromString(value).details)
    return found.retry_delay.ToNanoseconds() / 1e9 if is_there else None


def remembered(reason: str, retry_after: float | None) -> ErrorRecord:
    """The error as whoever asks again within two seconds gets it."""
    error = from_record(ErrorRecord(reason, "it failed", retry_after=retry_after))
    error.stands_for(2.0)
    return error.record()


@pytest.mark.parametrize("reason", sorted(BY_REASON))
def test_only_what_may_pass_by_itself_tells_when_to_retry(reason: str) -> None:
    untold, told = retry_info(ErrorRecord(reason, "it failed")), retry_info(ErrorRecord(reason, "", retry_after=7.0))
    again = (retry_info(remembered(reason, None)), retry_info(remembered(reason, 7.0)))
    if reason in ALWAYS:
        assert (untold, told, again) == (1.0, 7.0, (2.0, 2.0))
    elif reason in SOMETIMES:
        assert (untold, told, again) == (None, 7.0, (None, 2.0))
    else:
        assert reason in NEVER
        assert (untold, told, again) == (None, None, (None, None))


def test_the_page_of_errors_says_the_same() -> None:
    text = PAGE.read_text()
    for words, reasons in (("Always with it", ALWAYS), ("With it if waiting may help", SOMETIMES)):
        (line,) = re.findall(rf"^ *\* {words}: (.+)\.$", text, re.MULTILINE)
        assert sorted(line.split(", ")) == sorted(reasons)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\u2028"])
def test_an_error_is_summed_up_in_one_line(end: str) -> None:
    error = SourceForbidden(f"no access:{end}\t<html>{end}  <b>403</b>  {end}")
    assert error.summary == "SOURCE_FORBIDDEN: no access: <html> <b>403</b>"
