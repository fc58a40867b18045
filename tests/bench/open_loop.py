"""Calls at times that were fixed before, whatever the server does: a slow answer delays no later call, and counts.

The client is a process of its own that neither builds requests nor reads responses.
"""

import asyncio
import gc
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import grpc
import uvloop

START_SECONDS = 0.3  # until the first call: the connection is there by then


class Latencies(NamedTuple):
    """Milliseconds from when each call was due until it was answered (infinite: it failed) and until it was sent, both
    sorted."""

    answered: tuple[float, ...]
    late: tuple[float, ...]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the sorted values do not exceed; NaN if there is none."""
    if not ordered:
        return math.nan
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


class LoadProcess:
    """A client process that stays for many rounds."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    async def run(self, address: str, method: str, requests: Sequence[bytes], rate: float) -> Latencies:
        """Send `requests` (serialized) to `method` ("/package.Service/Rpc"), `rate` of them a second, evenly."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _run, address, method, requests, rate)

    def close(self) -> None:
        self._pool.shutdown()


def _run(address: str, method: str, requests: Sequence[bytes], rate: float) -> Latencies:
    gc.collect()
    gc.disable()  # a full collection of the client's own would delay a hundred calls
    try:
        return uvloop.run(_send(address, method, requests, rate))
    finally:
        gc.enable()


async def _send(address: str, method: str, requests: Sequence[bytes], rate: float) -> Latencies:
    answered: list[float] = []
    late: list[float] = []

    async with grpc.aio.insecure_channel(address) as channel:
        rpc = channel.unary_unary(method)

        async def call(request: bytes, due: float) -> None:
            late.append(1e3 * (time.monotonic() - due))
            try:
                await rpc(request)
            except grpc.aio.AioRpcError:
                answered.append(math.inf)
            else:
                answered.append(1e3 * (time.monotonic() - due))

        await channel.channel_ready()
        begin = time.monotonic() + START_SECONDS
        calls = []
        for number, request in enumerate(requests):
            due = begin + number / rate
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            calls.append(asyncio.ensure_future(call(request, due)))
        await asyncio.gather(*calls)
    return Latencies(tuple(sorted(answered)), tuple(sorted(late)))
