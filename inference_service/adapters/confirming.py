"""Asks again for answers of before the watch began: nothing else tells whether what they name is still there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from inference_service.adapters.answers import Answers
from shared.errors import LoraplexError, RegistryUnavailable

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.2, 30.0


async def keep_confirming(answers: Answers, ask: Callable[[str], Awaitable[object]], may_begin: asyncio.Event) -> None:
    """Until cancelled: whenever `may_begin` is set, `ask` for one reference after the other, until none is left.

    There may be 100,000 adapters, of which few were ever asked for: a snapshot of them all would cost far more. What
    the registry does not know any more, `ask` drops.
    """
    while True:
        await may_begin.wait()
        may_begin.clear()
        delay = FIRST_DELAY
        while references := await answers.unconfirmed():
            log.info("asking again for what was asked before the watch began", extra={"answers": len(references)})
            await _ask_each(references, ask)
            left = await answers.unconfirmed()
            log.info("asked again", extra={"answers": len(references), "left": len(left)})
            if left:
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_DELAY)


async def _ask_each(references: Sequence[str], ask: Callable[[str], Awaitable[object]]) -> None:
    for reference in references:
        try:
            await ask(reference)
        except RegistryUnavailable:
            return
        except LoraplexError as error:
            log.debug("asking again for %s: %s", reference, error)
