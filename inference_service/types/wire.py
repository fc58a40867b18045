"""Calls and answers as they go over a socket: msgspec structs, as msgpack."""

import msgspec

from inference_service.stats import AdapterStats, EngineStats
from inference_service.types.adapters import (
    AwaitResidency,
    DropStaged,
    ListStaged,
    Prepare,
    PrepareBlend,
    PreparedAdapter,
    ReadTexts,
    Resolve,
    StagedAdapter,
)
from inference_service.types.blobs import Acquire, Acquired, AcquireFailed, EngineStarted, Release
from inference_service.types.engine import (
    Abort,
    CancelCall,
    EngineReady,
    GetStats,
    Hello,
    KeepPins,
    ListResident,
    LoadAdapter,
    ResidentAdapter,
    StepOutput,
    Submit,
    UnloadAdapter,
)
from shared.errors import ErrorRecord

EngineRequest = Hello | Submit | Abort | LoadAdapter | UnloadAdapter | KeepPins | ListResident | GetStats | CancelCall


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Answer to the call with `call_id`, from the engine or from the adapter process.

    `digest` answers `Resolve`; `freed_bytes` answers `DropStaged`; `texts`, by file name, answers `ReadTexts`.
    """

    call_id: int
    error: ErrorRecord | None = None
    adapter: PreparedAdapter | None = None
    resident: list[ResidentAdapter] = []
    staged: list[StagedAdapter] = []
    digest: str = ""
    texts: dict[str, bytes] = {}
    freed_bytes: int = 0
    engine_stats: EngineStats | None = None
    adapter_stats: AdapterStats | None = None


EngineResponse = EngineReady | StepOutput | Reply
AdapterRequest = (
    Prepare
    | PrepareBlend
    | AwaitResidency
    | ReadTexts
    | Resolve
    | DropStaged
    | ListStaged
    | GetStats
    | EngineStarted
    | Acquire
    | Release
)
AdapterResponse = Reply | Acquired | AcquireFailed


def encode(message: msgspec.Struct) -> bytes:
    """`message` as msgpack."""
    return msgspec.msgpack.encode(message)


decode_engine_request = msgspec.msgpack.Decoder(EngineRequest).decode
decode_engine_response = msgspec.msgpack.Decoder(EngineResponse).decode
decode_adapter_request = msgspec.msgpack.Decoder(AdapterRequest).decode
decode_adapter_response = msgspec.msgpack.Decoder(AdapterResponse).decode
