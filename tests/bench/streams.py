"""Streams from client processes of their own: one Python process cannot read a GPU's tokens in time."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from loraplex import Client, LoraplexError
from loraplex.inference.v1 import inference_pb2

LONGEST_REQUEST_SECONDS = 600.0


class Ask(NamedTuple):
    """One request: sent at `at`, given up at `until`, both in seconds of CLOCK_MONOTONIC; 0: at once, and never."""

    adapter: str
    prompt: int
    output: int
    seed: int
    at: float = 0.0
    until: float = 0.0


class Seen(NamedTuple):
    """When it was sent and when each token arrived, on CLOCK_MONOTONIC; `error` is why it ended early, or empty."""

    ask: Ask
    sent: float
    arrivals: tuple[float, ...]
    error: str

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.sent if self.arrivals else float("inf")


def prompt_of(ask: Ask, vocab_size: int) -> list[int]:
    """Token ids that differ from those of any other seed from the first on, so that no prefix is cached."""
    start = ask.seed * 7919
    return [(start + position * 104_729) % vocab_size for position in range(ask.prompt)]


async def stream(client: Client, ask: Ask, vocab_size: int) -> Seen:
    """Send one greedy request that ends by length, at its time."""
    await asyncio.sleep(max(ask.at - time.monotonic(), 0.0))
    sent = time.monotonic()
    arrivals: list[float] = []
    error = ""
    try:
        async for event in client.generate(
            prompt_of(ask, vocab_size),
            adapter=ask.adapter,
            temperature=0,
            timeout=LONGEST_REQUEST_SECONDS,
            stop={"max_tokens": ask.output, "ignore_eos": True},
            output={"token_ids": True},
        ):
            if event.HasField("delta"):
                now = time.monotonic()
                arrivals += [now] * len(event.delta.token_ids)
                if ask.until and now > ask.until:
                    break
    except LoraplexError as failure:
        error = failure.reason
    return Seen(ask, sent, tuple(arrivals), error)


async def closed_loop(client: Client, asks: Sequence[Ask], at_a_time: int, vocab_size: int) -> list[Seen]:
    """All requests, `at_a_time` of them in flight."""
    turn = asyncio.Semaphore(at_a_time)

    async def one(ask: Ask) -> Seen:
        async with turn:
            return await stream(client, ask, vocab_size)

    return await asyncio.gather(*(one(ask) for ask in asks))


def run_share(address: str, asks: Sequence[Ask], at_a_time: int, vocab_size: int) -> list[Seen]:
    """One client process's part."""

    async def run() -> list[Seen]:
        async with Client(address) as client:
            # A channel connects at its first call, which would be a request whose time is taken.
            await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
            return await closed_loop(client, asks, at_a_time, vocab_size)

    return asyncio.run(run())


class ClientProcesses:
    """`count` processes that stay for many rounds."""

    def __init__(self, address: str, count: int, vocab_size: int) -> None:
        self._address, self._count, self._vocab_size = address, count, vocab_size
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))

    async def run(self, asks: Sequence[Ask], at_a_time: int | None = None) -> list[Seen]:
        """Every request, dealt out to the processes; `at_a_time` in flight in all, or as their `at` says."""
        loop = asyncio.get_running_loop()
        each = max(1, (at_a_time or len(asks)) // self._count)
        shares = [list(asks[start :: self._count]) for start in range(self._count)]
        parts = [
            loop.run_in_executor(self._pool, run_share, self._address, share, each, self._vocab_size)
            for share in shares
            if share
        ]
        return [seen for part in await asyncio.gather(*parts) for seen in part]

    def close(self) -> None:
        self._pool.shutdown()
