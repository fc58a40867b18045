"""LISTEN on a connection of its own: a notification is only a hint to look at the log, so losing one loses nothing."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import psycopg

from registry_service.repository import CHANGES_CHANNEL

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
# A connection whose other end is gone is noticed within seconds.
_KEEPALIVES: dict[str, Any] = {
    "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3
}  # fmt: skip


async def listen(url: str, wake: Callable[[], None]) -> None:
    """Calls `wake` whenever somebody commits a change, until cancelled. Connects again after a failure.

    `url` is postgresql://… and leads to Postgres itself: LISTEN does not survive a transaction pooler.
    """
    is_down = False
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(url, autocommit=True, **_KEEPALIVES) as connection:
                await connection.execute(f"LISTEN {CHANGES_CHANNEL}")
                log.info("listening for changes")
                is_down = False
                wake()
                async for _ in connection.notifies():
                    wake()
        except (psycopg.Error, OSError) as error:
            if not is_down:
                log.warning("cannot listen for changes, so they are polled for: %s", error)
            is_down = True
        await asyncio.sleep(RETRY_SECONDS)
