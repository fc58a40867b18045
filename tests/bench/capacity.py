"""A running service with adapters, and how many requests a second it answers: the beginning of load.py and soak.py."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from examples.stack import BASE_MODEL, MODEL, Stack, register, wait_for_base_model
from loraplex import Client
from shared.base_model import MODULES, ModelConfig, parse_config
from tests.bench.random_adapters import write_adapters
from tests.bench.shapes import SHAPES, write_model
from tests.bench.streams import Ask, ClientProcesses, Seen

RANK = 16


class Setting(NamedTuple):
    """What is served on a device, and the requests: `prompt` tokens in, `output` tokens out, at most `streams` at once.

    `clients`: client processes, each with one connection.
    """

    model: Path | None  # None: random weights of `shape`
    shape: str
    prompt: int
    output: int
    streams: int
    clients: int
    flags: tuple[str, ...]


SETTINGS = {
    "cpu": Setting(MODEL, BASE_MODEL, 48, 32, 16, 2, ("--dtype=float32", "--max-model-len=512", "--max-num-seqs=16")),
    "cuda": Setting(
        None, "llama-3.1-8b", 512, 128, 256, 16,
        ("--load-format=dummy", "--api-processes=4", "--max-num-seqs=256", "--max-batched-tokens=16384",
         "--max-model-len=4096"),
    ),
}  # fmt: skip


def model_config(setting: Setting) -> ModelConfig:
    """Of the model that is served."""
    if setting.model is None:
        return parse_config(SHAPES[setting.shape])
    return parse_config(json.loads((setting.model / "config.json").read_text()))


@asynccontextmanager
async def serving(
    setting: Setting, folder: Path, names: Sequence[str], *flags: str
) -> AsyncIterator[tuple[Stack, Client]]:
    """Both services, up, with a random adapter of rank `RANK` on all linears for each of `names`."""
    model = setting.model or folder / setting.shape
    if setting.model is None:
        write_model(model, setting.shape)
    write_adapters(folder / "adapters", names, model_config(setting), RANK, MODULES)
    stack = Stack(folder, flags=[*setting.flags, *flags], model=model, roots={"bench": folder / "adapters"})
    async with stack, stack.client() as client:
        await wait_for_base_model(client, setting.shape)
        for name in names:
            await register(client, name, f"file://bench/{name}", setting.shape)
        yield stack, client


class Asks:
    """Requests whose prompts never come again, for adapters in turn; an empty name is the base model."""

    def __init__(self, setting: Setting, names: Sequence[str]) -> None:
        self._setting, self._names = setting, itertools.cycle(names)
        self._seeds = itertools.count(time.time_ns() % 1_000_000)

    def next(self, at: float = 0.0) -> Ask:
        """One, to be sent at `at` of CLOCK_MONOTONIC; 0: at once."""
        return Ask(next(self._names), self._setting.prompt, self._setting.output, next(self._seeds), at)


async def capacity(clients: ClientProcesses, asks: Asks, streams: int, rounds: int) -> float:
    """Requests a second while `streams` of them are always in flight; each stream sends `rounds`."""
    await clients.run([asks.next() for _ in range(streams)], streams)  # connects, and loads the adapters
    seen = await clients.run([asks.next() for _ in range(streams * rounds)], streams)
    lost = [each.error or "cut" for each in seen if len(each.arrivals) != each.ask.output]
    assert not lost, lost
    return len(seen) / (max(last(each) for each in seen) - min(each.sent for each in seen))


def last(seen: Seen) -> float:
    """When its last token arrived."""
    return seen.arrivals[-1]
