"""`loraplex bench`: load on a running server, and what came out of it."""

import asyncio
import statistics
import time
from typing import Annotated, NamedTuple

import typer

from loraplex.cli.calls import run
from loraplex.cli.names import qualified
from loraplex.cli.options import DEFAULT_SERVER, AdapterOptions, Json, ServerAddress
from loraplex.cli.output import print_json, print_table
from loraplex.client import Client
from loraplex.inference.v1 import inference_pb2


class Measured(NamedTuple):
    """One finished request. Times are seconds."""

    first_token: float
    total: float
    tokens: int


class Load(NamedTuple):
    """What is asked of the server. Requests take the adapters in turn; "" is the base model."""

    adapters: list[str]
    streams: int
    requests: int
    prompt_tokens: int
    max_tokens: int


def bench(
    adapter: AdapterOptions = [],  # noqa: B006
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests in all.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Tokens of each answer, at most what the context leaves.")
    ] = 64,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Send requests and print tokens per second and latencies."""
    load = Load([qualified(name) for name in adapter] or [""], streams, requests, prompt_tokens, max_tokens)
    started = time.perf_counter()
    measured = run(lambda client: _measure(client, load), server=server)
    seconds = time.perf_counter() - started
    result = _summary(measured, seconds)
    if json:
        return print_json(result)
    return print_table(("", ""), (_for_people(key, value) for key, value in result.items()))


async def _measure(client: Client, load: Load) -> list[Measured]:
    info = await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
    turn = asyncio.Semaphore(load.streams)
    progress = Progress(load.requests)

    async def one(number: int) -> Measured:
        async with turn:
            # Every prompt differs from its first token on, so that none is in the prefix cache.
            start = number * 7919
            prompt = [(start + position * 104_729) % info.vocab_size for position in range(load.prompt_tokens)]
            measured = await _request(client, load.adapters[number % len(load.adapters)], prompt, load.max_tokens)
        progress.advance()
        return measured

    return await asyncio.gather(*(one(number) for number in range(load.requests)))


class Progress:
    """About ten lines in all, on a terminal and in a log; one for requests that finish together."""

    def __init__(self, total: int) -> None:
        self._total, self._num_done = total, 0
        self._started = time.perf_counter()
        self._shown = (0, "0.0 s")

    def advance(self) -> None:
        """One more request is done."""
        self._num_done += 1
        num_shown, when_shown = self._shown
        when = f"{time.perf_counter() - self._started:.1f} s"
        is_step = self._num_done - num_shown >= max(1, self._total // 10) and when != when_shown
        if is_step or self._num_done == self._total:
            typer.echo(f"{self._num_done} of {self._total} requests, {when}", err=True)
            self._shown = self._num_done, when


async def _request(client: Client, adapter: str, prompt: list[int], max_tokens: int) -> Measured:
    started = time.perf_counter()
    first_token = 0.0
    tokens = 0
    stop = {"max_tokens": max_tokens, "ignore_eos": True}
    async for event in client.generate(prompt, adapter=adapter, temperature=0, stop=stop, output={"token_ids": True}):
        if event.HasField("delta") and not first_token:
            first_token = time.perf_counter() - started
        if event.HasField("finished"):
            tokens = event.finished.usage.completion_tokens
    return Measured(first_token, time.perf_counter() - started, tokens)


def _summary(measured: list[Measured], seconds: float) -> dict[str, float]:
    first = sorted(m.first_token for m in measured)
    per_token = [(m.total - m.first_token) / (m.tokens - 1) for m in measured if m.tokens > 1]
    tokens = sum(m.tokens for m in measured)
    return {
        "requests": len(measured),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "first_token_p50_ms": 1e3 * statistics.median(first),
        "first_token_p99_ms": 1e3 * first[min(len(first) - 1, int(0.99 * len(first)))],
        "time_per_token_ms": 1e3 * statistics.mean(per_token) if per_token else 0.0,
    }


def _for_people(key: str, value: float) -> tuple[str, str]:
    """A figure's name and the figure with its unit, which the end of its key tells."""
    name = key.removesuffix("_ms").replace("_", " ")
    if key == "seconds":
        return "time", f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s"
    if key.endswith("_ms"):
        return name, f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
    return name, f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
