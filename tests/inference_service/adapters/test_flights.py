import asyncio

import pytest

from inference_service.adapters.flights import Flights
from shared.errors import AdapterMemory, AdapterNotFound, Internal, SourceUnavailable


class _Attempts:
    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self.error = error

    async def __call__(self) -> int:
        self.count += 1
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return self.count


async def test_one_attempt_serves_all_who_ask_meanwhile() -> None:
    flights, attempt = Flights[int](lambda _: 1.0), _Attempts()
    assert await asyncio.gather(*(flights.run("k", attempt) for _ in range(5))) == [1] * 5
    assert await flights.run("k", attempt) == 2


async def test_a_cancelled_waiter_does_not_end_the_attempt() -> None:
    flights, attempt = Flights[int](lambda _: 1.0), _Attempts()
    first = asyncio.create_task(flights.run("k", attempt))
    second = asyncio.create_task(flights.run("k", attempt))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


async def test_a_failure_is_remembered_for_its_time() -> None:
    now = [0.0]
    attempt = _Attempts(SourceUnavailable("no", metadata={"uri": "t"}))
    flights = Flights[int](lambda _: 2.0, lambda: now[0])
    for now[0] in (0.0, 0.5, 1.5):
        with pytest.raises(SourceUnavailable) as caught:
            await flights.run("k", attempt)
        assert caught.value.metadata == {"uri": "t"}
        assert caught.value.retry_after == 2.0 - now[0]
    assert attempt.count == 1
    now[0] = 2.5
    with pytest.raises(SourceUnavailable):
        await flights.run("k", attempt)
    assert attempt.count == 2


async def test_what_no_retry_mends_is_remembered_too_and_promises_nothing() -> None:
    flights, attempt = Flights[int](lambda _: 2.0, lambda: 0.0), _Attempts(AdapterNotFound("no"))
    for _ in range(2):
        with pytest.raises(AdapterNotFound) as caught:
            await flights.run("k", attempt)
        assert caught.value.retry_after is None
    assert attempt.count == 1


async def test_what_is_not_remembered_keeps_its_own_time() -> None:
    for own in (None, 0.5):
        with pytest.raises(AdapterMemory) as caught:
            await Flights[int](lambda _: 0.0).run("k", _Attempts(AdapterMemory("no", retry_after=own)))
        assert caught.value.retry_after == own


async def test_the_unforeseen_becomes_internal_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Internal) as caught:
        await Flights[int](lambda _: 0.0).run("k", _Attempts(RuntimeError("secret")))
    assert "secret" not in caught.value.message
    assert caught.value.metadata["id"] in caplog.text
