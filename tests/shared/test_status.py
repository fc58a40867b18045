"""Errors as statuses: whatever they hold, a client's metadata has room for them."""

from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2, status_pb2

from shared.errors import AdapterInvalid, FieldViolation, InvalidArgument, LoraplexError, NamespaceQuota
from shared.status import to_grpc_status


def parsed(error: LoraplexError) -> status_pb2.Status:
    ((key, value),) = to_grpc_status(error).trailing_metadata
    assert key == "grpc-status-details-bin"
    return status_pb2.Status.FromString(value)


def test_an_ordinary_error_is_told_in_full() -> None:
    status = parsed(AdapterInvalid("é" * 400, metadata={"tensor": "t" * 300}))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.message, dict(info.metadata)) == ("é" * 400, {"tensor": "t" * 300})


@pytest.mark.parametrize("text", ["x" * 20_000, "漢" * 20_000, "\0" * 20_000])
def test_everything_that_is_long_is_cut(text: str) -> None:
    many = {f"{i}{text}": text for i in range(100)}
    for error in (
        InvalidArgument([FieldViolation(text, text)] * 5000),
        AdapterInvalid(text, metadata=many),
        NamespaceQuota(text, metadata={"namespace": text}, retry_after=1.0),
    ):
        status = parsed(error)
        assert len(quote(status.message)) + status.ByteSize() * 4 / 3 < 7000
        assert "…" in status.message
    bad = error_details_pb2.BadRequest()
    status = parsed(InvalidArgument([FieldViolation(f"f{i}", "is wrong") for i in range(17)]))
    assert status.details[1].Unpack(bad)
    assert [v.field for v in bad.field_violations] == [f"f{i}" for i in range(16)]
    assert status.message.endswith("f15: is wrong; and 1 more")
