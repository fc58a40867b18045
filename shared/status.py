"""The one table between domain errors and `google.rpc.Status`.

A status travels as HTTP/2 metadata, of which clients take 8 KiB: long errors are shortened here, whoever raises them.
"""

from urllib.parse import quote

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import (
    BY_REASON,
    ErrorRecord,
    FailedPrecondition,
    FieldViolation,
    Internal,
    InvalidArgument,
    LoraplexError,
    NamespaceQuota,
    from_record,
)

DOMAIN = "loraplex"

MAX_VIOLATIONS = 16
_MAX_METADATA = 16  # entries
_RETRY_SECONDS = 1.0  # where the error may pass and does not say when
_TLS_FAILURES = ("handshake failed", "verification check failed")  # in gRPC's words
_MAX_STATUS_BYTES = 6 << 10  # as they travel
_TEXT_BYTES = (1024, 512, 256, 128, 64)  # how long each text may be; the first that fits


def to_grpc_status(error: LoraplexError) -> grpc.Status:
    """`error` as a status with ErrorInfo and the further details that apply to its kind.

    At most 16 field violations are told, and all texts are cut until the whole fits into a client's metadata.
    """
    statuses = (_status(error, limit) for limit in _TEXT_BYTES)
    status = next((status for status in statuses if _travelling_bytes(status) <= _MAX_STATUS_BYTES), None)
    return rpc_status.to_status(status or _status(error, _TEXT_BYTES[-1]))


def _travelling_bytes(status: status_pb2.Status) -> int:
    """The message goes percent-encoded, and once more in the details, which go as base64."""
    size: int = status.ByteSize()
    return len(quote(status.message, safe=" ")) + size * 4 // 3


def _status(error: LoraplexError, limit: int) -> status_pb2.Status:
    """The status, with no text of more than about `limit` bytes."""
    code: grpc.StatusCode = grpc.StatusCode[error.code]
    metadata = {_cut(k, limit): _cut(v, limit) for k, v in list(error.metadata.items())[:_MAX_METADATA]}
    message = _message(error, limit)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if isinstance(error, InvalidArgument):
        told = error.violations[:MAX_VIOLATIONS]
        violations = [{"field": _cut(v.field, limit), "description": _cut(v.description, limit)} for v in told]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if isinstance(error, FailedPrecondition):
        subject = next(iter(metadata.values()), "")
        violation = {"type": error.reason, "subject": subject, "description": message}
        details.append(error_details_pb2.PreconditionFailure(violations=[violation]))
    if isinstance(error, NamespaceQuota):
        quota = {"subject": metadata.get("namespace", ""), "description": message}
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    retry_after = error.retry_after
    if retry_after is None and error.may_pass:
        retry_after = _RETRY_SECONDS
    if retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=message, details=[_pack(d) for d in details])


def _message(error: LoraplexError, limit: int) -> str:
    more = len(error.violations) - MAX_VIOLATIONS
    if more <= 0:
        return _cut(error.message, limit)
    told = "; ".join(f"{v.field}: {v.description}" for v in error.violations[:MAX_VIOLATIONS])
    return f"{_cut(told, limit)}; and {more} more"


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8, which end in an ellipsis if something is missing."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode(errors="ignore") + "…"


def _pack(detail: Message) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed


def from_rpc_error(error: grpc.aio.AioRpcError) -> LoraplexError:
    """The domain error behind a failed call.

    Without an ErrorInfo of ours (a proxy, a broken connection) it is a plain `LoraplexError` that keeps code and text.
    UNAVAILABLE is worth a retry then, unless TLS does not come about: that takes other files.
    """
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    record = _record(status) if status is not None else None
    if record is not None and record.reason in BY_REASON:
        return from_record(record)
    return _Foreign(error.code().name, error.details() or error.code().name.lower())


def _record(status: status_pb2.Status) -> ErrorRecord | None:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_info = False
    retry_after = None
    for detail in status.details:
        if detail.Unpack(info):
            has_info = info.domain == DOMAIN
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(bad)
    if not has_info:
        return None
    violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
    return ErrorRecord(info.reason, status.message, dict(info.metadata), retry_after, violations)


class _Foreign(LoraplexError):
    """A failed call that carried no ErrorInfo of ours."""

    passes = "sometimes"

    def __init__(self, code: str, message: str) -> None:
        is_passing = code == "UNAVAILABLE" and not any(each in message.lower() for each in _TLS_FAILURES)
        super().__init__(message, retry_after=_RETRY_SECONDS if is_passing else None)
        self.code = self.reason = code  # type: ignore[misc]


__all__ = ["DOMAIN", "Internal", "from_rpc_error", "to_grpc_status"]
