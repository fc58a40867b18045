"""The one table between domain errors and `google.rpc.Status`."""

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
    Unavailable,
    from_record,
)

DOMAIN = "loraplex"


def to_grpc_status(error: LoraplexError) -> grpc.Status:
    """`error` as a status with ErrorInfo and the further details that apply to its kind."""
    code: grpc.StatusCode = grpc.StatusCode[error.code]
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    if isinstance(error, InvalidArgument):
        violations = [{"field": v.field, "description": v.description} for v in error.violations]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if isinstance(error, FailedPrecondition):
        subject = next(iter(error.metadata.values()), "")
        violation = {"type": error.reason, "subject": subject, "description": error.message}
        details.append(error_details_pb2.PreconditionFailure(violations=[violation]))
    if isinstance(error, NamespaceQuota):
        quota = {"subject": error.metadata.get("namespace", ""), "description": error.message}
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    retry_after = error.retry_after
    if retry_after is None and isinstance(error, Unavailable):
        retry_after = 1.0
    if retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=error.message, details=[_pack(d) for d in details])
    )


def _pack(detail: Message) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed


def from_rpc_error(error: grpc.aio.AioRpcError) -> LoraplexError:
    """The domain error behind a failed call.

    Without an ErrorInfo of ours (a proxy, a broken connection) the code alone decides: UNAVAILABLE stays `Unavailable`,
    everything else becomes a plain `LoraplexError` that keeps code and text.
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

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = self.reason = code  # type: ignore[misc]


__all__ = ["DOMAIN", "Internal", "from_rpc_error", "to_grpc_status"]
