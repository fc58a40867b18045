"""The error tree of both services. Every error has a `code` (the gRPC status name) and a `reason`.

    LoraplexError
    ├── InvalidArgument         INVALID_ARGUMENT    INVALID_ARGUMENT, with field violations
    │   └── RequestIdReused     INVALID_ARGUMENT    REQUEST_ID_REUSED
    ├── NotFound                NOT_FOUND
    │   ├── AdapterNotFound                         ADAPTER_NOT_FOUND
    │   └── BaseModelNotFound                       BASE_MODEL_NOT_FOUND
    ├── FailedPrecondition      FAILED_PRECONDITION
    │   ├── BaseModelUnknown                        BASE_MODEL_UNKNOWN
    │   ├── BaseModelMismatch                       BASE_MODEL_MISMATCH
    │   ├── BaseModelConflict                       BASE_MODEL_CONFLICT
    │   ├── AdapterInvalid                          ADAPTER_INVALID
    │   ├── UnsupportedAdapter                      UNSUPPORTED_ADAPTER
    │   ├── SourceNotFound                          SOURCE_NOT_FOUND
    │   ├── SourceForbidden                         SOURCE_FORBIDDEN
    │   ├── CredentialNotAllowed                    CREDENTIAL_NOT_ALLOWED
    │   └── VersionInUse                            VERSION_IN_USE
    ├── AdapterDeleted          ALREADY_EXISTS      ADAPTER_DELETED
    ├── EtagMismatch            ABORTED             ETAG_MISMATCH
    ├── AdapterUnloaded         ABORTED             ADAPTER_UNLOADED
    ├── WatchCompacted          OUT_OF_RANGE        WATCH_COMPACTED
    ├── DigestMismatch          DATA_LOSS           DIGEST_MISMATCH
    ├── Unauthenticated         UNAUTHENTICATED     UNAUTHENTICATED
    ├── PermissionDenied        PERMISSION_DENIED   PERMISSION_DENIED
    ├── ResourceExhausted       RESOURCE_EXHAUSTED
    │   ├── QueueFull                               QUEUE_FULL
    │   ├── TenantQuota                             TENANT_QUOTA
    │   ├── AdapterMemory                           ADAPTER_MEMORY
    │   ├── RateLimited                             RATE_LIMITED
    │   ├── ClientTooSlow                           CLIENT_TOO_SLOW
    │   ├── WatchTooSlow                            WATCH_TOO_SLOW
    │   └── NamespaceQuota                          NAMESPACE_QUOTA
    ├── Unavailable             UNAVAILABLE
    │   ├── SourceUnavailable                       SOURCE_UNAVAILABLE
    │   ├── RegistryUnavailable                     REGISTRY_UNAVAILABLE
    │   ├── EngineUnavailable                       ENGINE_UNAVAILABLE
    │   └── Draining                                DRAINING
    ├── DeadlineUnreachable     DEADLINE_EXCEEDED   DEADLINE_UNREACHABLE
    ├── Unimplemented           UNIMPLEMENTED       UNIMPLEMENTED
    └── Internal                INTERNAL            INTERNAL

`passes` of a class says whether such an error may pass by itself, so that the same request may succeed later. Only one
that does has a `retry_after`.

`shared.status` maps these to and from `google.rpc.Status`; `ErrorRecord` carries them between processes.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import msgspec

# `sometimes`: whoever raises it knows, and then tells `retry_after`.
Passing = Literal["never", "sometimes", "always"]


class FieldViolation(msgspec.Struct, frozen=True):
    """One wrong field of a request: its path (`sampling.top_p`) and what is wrong with it."""

    field: str
    description: str


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error as data, for sending between processes."""

    reason: str
    message: str
    metadata: dict[str, str] = {}
    retry_after: float | None = None
    violations: tuple[FieldViolation, ...] = ()


def one_line(text: str) -> str:
    """`text` as one line, whatever a driver, a server or a name that it quotes has put into it."""
    return " ".join(line.strip() for line in text.splitlines())


class LoraplexError(Exception):
    """An error that a caller may see.

    Args:
        message: One sentence that says what is wrong and, where possible, what to do.
        metadata: Machine-readable facts (`tensor`, `key`, `adapter` …); becomes `ErrorInfo.metadata`.
        retry_after: Seconds after which the same request may succeed; becomes `RetryInfo`. Dropped if the error never
            passes by itself.
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    passes: ClassVar[Passing] = "never"
    violations: tuple[FieldViolation, ...] = ()

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after = None if self.passes == "never" else retry_after

    @property
    def summary(self) -> str:
        """Reason and message in one line."""
        return one_line(f"{self.reason}: {self.message}")

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later though nobody does anything about it."""
        return self.passes == "always" or self.retry_after is not None

    def stands_for(self, seconds: float) -> None:
        """Nobody tries again for so long: whom a retry may help shall wait. Others are not told to retry."""
        if self.may_pass:
            self.retry_after = seconds

    def record(self) -> ErrorRecord:
        """This error as data."""
        return ErrorRecord(self.reason, self.message, self.metadata, self.retry_after, self.violations)


class InvalidArgument(LoraplexError):
    """One or more fields of the request are wrong."""

    code = reason = "INVALID_ARGUMENT"

    def __init__(self, violations: Sequence[FieldViolation], message: str | None = None) -> None:
        super().__init__(message or "; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidArgument":
        """The error for a single wrong field."""
        return cls([FieldViolation(field, description)])


class RequestIdReused(InvalidArgument):
    reason = "REQUEST_ID_REUSED"


class NotFound(LoraplexError):
    code = reason = "NOT_FOUND"


class AdapterNotFound(NotFound):
    reason = "ADAPTER_NOT_FOUND"


class BaseModelNotFound(NotFound):
    reason = "BASE_MODEL_NOT_FOUND"


class FailedPrecondition(LoraplexError):
    code = reason = "FAILED_PRECONDITION"


class BaseModelUnknown(FailedPrecondition):
    reason = "BASE_MODEL_UNKNOWN"


class BaseModelMismatch(FailedPrecondition):
    reason = "BASE_MODEL_MISMATCH"


class BaseModelConflict(FailedPrecondition):
    reason = "BASE_MODEL_CONFLICT"


class AdapterInvalid(FailedPrecondition):
    """The files contradict themselves or the base model; metadata names the `tensor` or `key`."""

    reason = "ADAPTER_INVALID"


class UnsupportedAdapter(FailedPrecondition):
    """Valid for PEFT, not served here; metadata names the `key`, the message says what to do."""

    reason = "UNSUPPORTED_ADAPTER"


class SourceNotFound(FailedPrecondition):
    reason = "SOURCE_NOT_FOUND"


class SourceForbidden(FailedPrecondition):
    reason = "SOURCE_FORBIDDEN"


class CredentialNotAllowed(FailedPrecondition):
    reason = "CREDENTIAL_NOT_ALLOWED"


class VersionInUse(FailedPrecondition):
    reason = "VERSION_IN_USE"


class AdapterDeleted(LoraplexError):
    code, reason = "ALREADY_EXISTS", "ADAPTER_DELETED"


class EtagMismatch(LoraplexError):
    code, reason = "ABORTED", "ETAG_MISMATCH"


class AdapterUnloaded(LoraplexError):
    code, reason = "ABORTED", "ADAPTER_UNLOADED"


class WatchCompacted(LoraplexError):
    code, reason = "OUT_OF_RANGE", "WATCH_COMPACTED"


class DigestMismatch(LoraplexError):
    code, reason = "DATA_LOSS", "DIGEST_MISMATCH"


class Unauthenticated(LoraplexError):
    code = reason = "UNAUTHENTICATED"


class PermissionDenied(LoraplexError):
    code = reason = "PERMISSION_DENIED"


class ResourceExhausted(LoraplexError):
    code = reason = "RESOURCE_EXHAUSTED"


class QueueFull(ResourceExhausted):
    reason = "QUEUE_FULL"
    passes = "sometimes"


class TenantQuota(ResourceExhausted):
    reason = "TENANT_QUOTA"
    passes = "sometimes"


class AdapterMemory(ResourceExhausted):
    reason = "ADAPTER_MEMORY"
    passes = "sometimes"


class RateLimited(ResourceExhausted):
    """The tenant has used up its rate; metadata names it as `limit`."""

    reason = "RATE_LIMITED"
    passes = "sometimes"


class ClientTooSlow(ResourceExhausted):
    """The client did not read its stream."""

    reason = "CLIENT_TOO_SLOW"


class WatchTooSlow(ResourceExhausted):
    """The caller did not keep up with the changes; it may resume."""

    reason = "WATCH_TOO_SLOW"
    passes = "sometimes"


class NamespaceQuota(ResourceExhausted):
    reason = "NAMESPACE_QUOTA"


class Unavailable(LoraplexError):
    code = reason = "UNAVAILABLE"
    passes = "always"


class SourceUnavailable(Unavailable):
    reason = "SOURCE_UNAVAILABLE"


class RegistryUnavailable(Unavailable):
    reason = "REGISTRY_UNAVAILABLE"


class EngineUnavailable(Unavailable):
    reason = "ENGINE_UNAVAILABLE"


class Draining(Unavailable):
    reason = "DRAINING"


class DeadlineUnreachable(LoraplexError):
    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"
    passes = "sometimes"


class Unimplemented(LoraplexError):
    code = reason = "UNIMPLEMENTED"


class Internal(LoraplexError):
    """An exception nobody foresaw. The message is always "internal error" with the id that the log repeats."""

    code = reason = "INTERNAL"


def _concrete(cls: type[LoraplexError]) -> list[type[LoraplexError]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_concrete(sub))]


BY_REASON: dict[str, type[LoraplexError]] = {c.reason: c for c in _concrete(LoraplexError) if "reason" in vars(c)}


def from_record(record: ErrorRecord) -> LoraplexError:
    """The error that `record` describes; an unknown reason becomes `Internal`."""
    cls = BY_REASON.get(record.reason, Internal)
    if issubclass(cls, InvalidArgument):
        return cls(record.violations, record.message)
    return cls(record.message, metadata=record.metadata, retry_after=record.retry_after)
