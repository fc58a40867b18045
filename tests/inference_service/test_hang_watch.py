"""When a process counts as hanging, and what is done then. Seconds are those of a clock that the tests set."""

import asyncio
import itertools

import pytest

from inference_service import watchdog
from inference_service.hang_watch import TICK_SECONDS, HangWatch
from shared.errors import EngineUnavailable

TIMEOUT = 60.0
ALMOST = int(TIMEOUT / TICK_SECONDS) - 1  # ticks


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watching:
    """A watch whose ticks come in time, unless told otherwise."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._watch = HangWatch(TIMEOUT, self.clock)

    def tick(
        self, times: int = 1, after: float = TICK_SECONDS, *, is_up: bool = True, has_answered: bool = False
    ) -> int:
        """How many of the ticks found a hang."""
        found = 0
        for _ in range(times):
            self.clock.now += after
            found += self._watch.tick(is_up=is_up, has_answered=has_answered)
        return found


@pytest.fixture
def watching() -> Watching:
    return Watching()


def test_silence_is_a_hang_after_the_timeout_and_not_before(watching: Watching) -> None:
    assert watching.tick(has_answered=True) == 0
    assert watching.tick(ALMOST) == 0
    assert watching.tick() == 1


def test_an_answer_ends_the_silence(watching: Watching) -> None:
    watching.tick(ALMOST)
    watching.tick(has_answered=True)
    assert watching.tick(ALMOST) == 0
    assert watching.tick() == 1


def test_a_process_that_starts_or_has_ended_may_be_silent(watching: Watching) -> None:
    assert watching.tick(10 * ALMOST, is_up=False) == 0
    assert watching.tick(ALMOST) == 0
    watching.tick(is_up=False)
    assert watching.tick(ALMOST) == 0


def test_time_in_which_the_watch_itself_was_suspended_hardly_counts(watching: Watching) -> None:
    watching.tick(has_answered=True)
    assert watching.tick(ALMOST // 2) == 0
    assert watching.tick(after=8 * 3600.0) == 0
    assert watching.tick(ALMOST // 2 - 1) == 0
    assert watching.tick(2) == 1


def test_one_that_could_not_be_killed_is_found_again(watching: Watching) -> None:
    assert watching.tick(ALMOST + 1) == 1
    assert watching.tick(ALMOST) == 0
    assert watching.tick() == 1


class Frozen:
    """A process that has started; `kill` ends the test's wait."""

    is_up = True

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    def kill(self) -> None:
        self.killed.set()


@pytest.fixture
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK_SECONDS", "ASK_SECONDS"):
        monkeypatch.setattr(watchdog, name, 0.001)


async def never() -> None:
    await asyncio.Event().wait()


async def refused() -> None:
    raise EngineUnavailable("the engine is not ready")


@pytest.mark.usefixtures("_quickly")
@pytest.mark.parametrize("ask", [never, refused])
async def test_who_does_not_answer_is_killed(ask: watchdog.Ask, caplog: pytest.LogCaptureFixture) -> None:
    process = Frozen()
    watching = asyncio.create_task(watchdog.watch("engine", process, ask, 0.05))
    await asyncio.wait_for(process.killed.wait(), 60)
    watching.cancel()
    told = {(record.levelname, record.message) for record in caplog.records}
    assert told == {("ERROR", "the engine process has not answered for 0.05 seconds; it is killed")}


@pytest.mark.usefixtures("_quickly")
async def test_a_lost_question_is_asked_again_and_our_own_mistakes_kill_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, asked = itertools.count(), asyncio.Event()

    async def ask() -> None:
        number = next(numbers)
        if number == 0:
            await never()
        if number == 1:
            raise KeyError("x")
        if number == 5:
            asked.set()

    process = Frozen()
    monkeypatch.setattr(watchdog, "ANSWER_SHARE", 1e-6)
    watching = asyncio.create_task(watchdog.watch("engine", process, ask, 3600.0))
    await asyncio.wait_for(asked.wait(), 60)
    watching.cancel()
    assert not process.killed.is_set()
    assert [record.message for record in caplog.records] == ["a process cannot be asked whether it answers"]
