"""Asks a process again and again whether it answers, and kills it when it hangs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from inference_service.hang_watch import TICK_SECONDS, HangWatch
from shared.errors import LoraplexError

log = logging.getLogger(__name__)

ASK_SECONDS = 1.0  # between two questions
ANSWER_SHARE = 1 / 3  # of the timeout; then it is asked again: a question may be lost with the process before this one

Ask = Callable[[], Awaitable[object]]


class Watched(Protocol):
    """`child.Child`, as far as it is watched. `is_up`: its start is over and it has not ended since."""

    @property
    def is_up(self) -> bool: ...
    def kill(self) -> None: ...


async def watch(role: str, process: Watched, ask: Ask, seconds: float) -> None:
    """Kill the process whenever it has been up and silent for `seconds`, until cancelled.

    `role`: what it is called. `ask`: returns when it has answered; raises LoraplexError while it cannot be asked.
    """
    questions = _Questions(ask, seconds * ANSWER_SHARE)
    asking = asyncio.create_task(questions.run())
    hang_watch = HangWatch(seconds)
    try:
        while True:
            if hang_watch.tick(is_up=process.is_up, has_answered=questions.take_answer()):
                log.error("the %s process has not answered for %g seconds; it is killed", role, seconds)
                process.kill()
            await asyncio.sleep(TICK_SECONDS)
    finally:
        asking.cancel()


class _Questions:
    """Asks without end, and remembers whether there was an answer."""

    def __init__(self, ask: Ask, patience: float) -> None:
        self._ask = ask
        self._patience = patience
        self._is_answered = False

    def take_answer(self) -> bool:
        """Whether there was one since this was last asked."""
        is_answered, self._is_answered = self._is_answered, False
        return is_answered

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    await self._ask()
            except (LoraplexError, TimeoutError):
                pass
            except Exception:  # our own mistake, which nobody shall be killed for
                log.exception("a process cannot be asked whether it answers")
                self._is_answered = True
            else:
                self._is_answered = True
            await asyncio.sleep(ASK_SECONDS)
