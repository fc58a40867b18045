"""LISTEN on a connection of its own: a notification is only a hint to look at the log, so losing one loses nothing."""

import asyncio
import logging
from collections.abc import Callable

import psycopg

from registry_service.database import PATIENCE
from registry_service.giving_up import within
from registry_service.repository import CHANGES_CHANNEL
from shared.errors import one_line

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
QUIET_SECONDS = 10.0  # after which it is asked whether it still listens
ANSWER_SECONDS = 10.0


async def listen(url: str, wake: Callable[[], None]) -> None:
    """Calls `wake` whenever somebody commits a change, until cancelled. Connects again after a failure.

    `url` is postgresql://… and leads to Postgres itself: LISTEN does not survive a transaction pooler.
    """
    is_down = False
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(url, autocommit=True, **PATIENCE) as connection:
                await within(ANSWER_SECONDS, connection.execute(f"LISTEN {CHANGES_CHANNEL}"))
                log.info("listening for changes")
                is_down = False
                wake()
                while True:
                    async for _ in connection.notifies(timeout=QUIET_SECONDS):
                        wake()
                    await within(ANSWER_SECONDS, connection.execute("SELECT 1"))
                    wake()  # what was told meanwhile was told to nobody
        except (psycopg.Error, OSError) as error:
            if not is_down:
                log.warning("cannot listen for changes, so they are polled for: %s", one_line(str(error)))
            is_down = True
        await asyncio.sleep(RETRY_SECONDS)
