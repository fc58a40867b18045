"""What a failed call to the registry means."""

import grpc
from google.protobuf.message import DecodeError

from shared.errors import (
    AdapterDeleted,
    FailedPrecondition,
    InvalidArgument,
    LoraplexError,
    NotFound,
    PermissionDenied,
    RegistryUnavailable,
    ResourceExhausted,
    SourceUnavailable,
    Unauthenticated,
)
from shared.status import from_rpc_error

CALL_TIMEOUT = 3.0  # seconds that any call to it may take, but watches

# What the registry says about the reference itself. Any other failure is the registry's, and says nothing about it …
VERDICTS = (InvalidArgument, NotFound, FailedPrecondition, AdapterDeleted)
# … but with these it answers that it cannot say yet: it looks for the adapter in a source.
NOT_YET = (SourceUnavailable, ResourceExhausted)
# It does not know this replica: its callers, who cannot mend that, are told that the registry is unreachable.
NOT_KNOWN = (PermissionDenied, Unauthenticated)


def error_of(rpc_error: grpc.aio.AioRpcError) -> LoraplexError:
    """The error behind a failed call."""
    try:
        return from_rpc_error(rpc_error)
    except (ValueError, DecodeError) as malformed:  # details that are no status, or another one than the call's
        return RegistryUnavailable(f"malformed error details: {malformed!s:.100}")


def unreachable(error: LoraplexError) -> str:
    """How a failure is told that is the registry's."""
    return f"the registry is unreachable ({error.code}: {error.message:.200})"
