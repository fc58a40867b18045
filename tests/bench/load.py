"""`make bench-load`: first tokens, tokens a second and streams in flight at 50, 80 and 100 % of what can be answered.

What can be answered is measured first: requests a second while as many streams as fit in a step are always in flight.
Then requests come at random times (Poisson) at a share of that rate, whatever the server does, half of them for the
base model and half for eight adapters. SmolLM2 on a CPU; with `--device cuda` random weights of the 8B shape.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.capacity import SETTINGS, Asks, Setting, capacity, last, model_config, serving
from tests.bench.open_loop import quantile
from tests.bench.streams import Ask, ClientProcesses, Seen

NUM_ADAPTERS = 8
SHARES = (0.5, 0.8, 1.0)
DELAY = 1.0  # seconds until the first request of a run


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of a Poisson process, in seconds from its beginning."""
    chance, at, found = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        found.append(at)
    return found


def row(share: float, seconds: float, seen: Sequence[Seen]) -> dict[str, Any]:
    """The figures of one run: milliseconds, and means over the `seconds` in which requests came."""
    answered = [each for each in seen if len(each.arrivals) == each.ask.output]
    first = sorted(1e3 * (each.arrivals[0] - each.ask.at) for each in answered)
    between = sorted(
        1e3 * (last(each) - each.arrivals[0]) / (each.ask.output - 1) for each in answered if each.ask.output > 1
    )
    begin = min((each.ask.at for each in seen), default=0.0)
    tokens = sum(at < begin + seconds for each in seen for at in each.arrivals)
    open_seconds = sum(min(last(each), begin + seconds) - each.sent for each in answered)
    return {
        "share": share,
        "requests": len(seen),
        "refused": dict(Counter(each.error for each in seen if each.error)),
        "streams": open_seconds / seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_p50": quantile(first, 0.5),
        "first_token_p99": quantile(first, 0.99),
        "token_p50": quantile(between, 0.5),
        "token_p99": quantile(between, 0.99),
    }


async def measure(setting: Setting, folder: Path, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Start the services, find out what they can answer, and ask for the shares of that."""
    names = [f"bench-{number}" for number in range(NUM_ADAPTERS)]
    started = time.monotonic()
    async with serving(setting, folder, names) as (stack, _):
        print(f"serving, adapters registered, after {time.monotonic() - started:.1f} s", flush=True)
        clients = ClientProcesses(stack.inference.address, setting.clients, model_config(setting).vocab_size)
        try:
            asks = Asks(setting, [each for name in names for each in ("", name)])
            most = await capacity(clients, asks, setting.streams, rounds)
            print(f"{most:.2f} requests/s with {setting.streams} streams in flight", flush=True)
            rows = []
            for number, share in enumerate(SHARES):
                begin = time.monotonic() + DELAY
                due = [asks.next(begin + at) for at in arrivals(share * most, seconds, number)]
                rows.append(row(share, seconds, await _run(clients, due, setting)))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            clients.close()
    return [{"requests_per_second": most, "streams": setting.streams}, *rows]


async def _run(clients: ClientProcesses, due: list[Ask], setting: Setting) -> list[Seen]:
    return await clients.run(due, at_a_time=setting.clients * len(due))  # nobody waits for a turn


def show(setting: Setting, rows: Sequence[dict[str, Any]]) -> None:
    """The figures as a table."""
    table = Table("load", "streams", "tokens/s", "first token p50, p99 ms", "each further p50, p99 ms", "refused")
    for each in rows[1:]:
        table.add_row(
            f"{each['share']:.0%}",
            f"{each['streams']:.1f}",
            f"{each['tokens_per_second']:.0f}",
            f"{each['first_token_p50']:.0f}, {each['first_token_p99']:.0f}",
            f"{each['token_p50']:.1f}, {each['token_p99']:.1f}",
            str(sum(each["refused"].values())),
        )
    title = f"{setting.shape}: {setting.prompt} tokens in, {setting.output} out; {rows[0]['requests_per_second']:.2f}"
    Console().print(f"{title} requests/s at most")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=SETTINGS)
    parser.add_argument("--seconds", default=60.0, type=float, help="of each load")
    parser.add_argument("--rounds", default=4, type=int, help="requests of a stream while capacity is measured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.device]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows = asyncio.run(measure(setting, Path(folder), arguments.seconds, arguments.rounds))
    show(setting, rows)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
