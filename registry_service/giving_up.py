"""Ends what waits for a Postgres that may never answer."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_SECONDS = 2.0  # in which the server may confirm that it has cancelled a statement


async def give_up(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancels tasks that use connections; those are closed then. Returns within seconds.

    psycopg asks the server to cancel the statement and waits for that; to be cancelled again ends that wait.
    """
    for _ in range(2):
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` if there is one in time.

    Raises:
        TimeoutError: there is none, and `work` is given up.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
    finally:
        await give_up([] if task.done() else [task])
    raise TimeoutError(f"no answer within {seconds:g} s")
