"""`loraplex bench`: load on a running server, and what came out of it."""

import asyncio
import statistics
import time
from typing import Annotated, NamedTuple

import typer

from loraplex.cli.options import DEFAULT_SERVER, Json, ServerAddress, print_json, print_table, run
from loraplex.client import Client
from loraplex.inference.v1 import inference_pb2


class Measured(NamedTuple):
    """One finished request. Times are seconds."""

    first_token: float
    total: float
    tokens: int


def bench(
    adapter: Annotated[list[str], typer.Option(help="Adapter references, taken in turn; repeatable.")] = [],  # noqa: B006
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests in all.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Send requests and print tokens per second and latencies."""
    started = time.perf_counter()
    measured = run(
        lambda client: _load(client, adapter or [""], streams, requests, prompt_tokens, max_tokens), server=server
    )
    seconds = time.perf_counter() - started
    result = _summary(measured, seconds)
    if json:
        return print_json(result)
    return print_table(("", ""), ((k, f"{v:.4g}") for k, v in result.items()))


async def _load(
    client: Client, adapters: list[str], streams: int, requests: int, prompt_tokens: int, max_tokens: int
) -> list[Measured]:
    info = await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
    turn = asyncio.Semaphore(streams)

    async def one(number: int) -> Measured:
        # Every prompt differs from its first token on, so that none is in the prefix cache.
        prompt = [(number * 7919 + position * 104_729) % info.vocab_size for position in range(prompt_tokens)]
        async with turn:
            return await _request(client, adapters[number % len(adapters)], prompt, max_tokens)

    return await asyncio.gather(*(one(number) for number in range(requests)))


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
