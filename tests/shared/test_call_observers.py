"""What a call is said to have ended with."""

import asyncio
from dataclasses import dataclass

import grpc
import pytest

from shared.call_observers import code_of

CODES = grpc.StatusCode


@dataclass
class Context:
    """Of a call that has `remaining` seconds left, and that was aborted with `aborted` if at all."""

    remaining: float | None = None
    aborted: grpc.StatusCode | int | None = None

    def time_remaining(self) -> float | None:
        return self.remaining

    def code(self) -> grpc.StatusCode | int | None:
        return self.aborted


@pytest.mark.parametrize(
    ("error", "context", "code"),
    [
        (asyncio.CancelledError(), Context(), CODES.CANCELLED),
        (asyncio.CancelledError(), Context(remaining=5.0), CODES.CANCELLED),
        (asyncio.CancelledError(), Context(remaining=0.001), CODES.DEADLINE_EXCEEDED),
        (GeneratorExit(), Context(remaining=-1.0), CODES.DEADLINE_EXCEEDED),
        (grpc.aio.AbortError(), Context(aborted=CODES.NOT_FOUND), CODES.NOT_FOUND),
        (grpc.aio.AbortError(), Context(aborted=8), CODES.RESOURCE_EXHAUSTED),
        (RuntimeError(), Context(), CODES.UNKNOWN),
    ],
)
def test_codes(error: BaseException, context: Context, code: grpc.StatusCode) -> None:
    assert code_of(error, context) is code
