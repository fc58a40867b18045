"""`make demo`: one base model and three adapters answer the same prompts at the same time, in one batch."""

import asyncio
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.prompts import ADAPTERS, PROMPTS
from examples.stack import NotServing, Stack, register, wait_for_base_model
from loraplex import Client
from loraplex.inference.v1 import control_pb2, inference_pb2
from loraplex.registry.v1.resources_pb2 import LoraConfig
from shared.errors import InvalidArgument

MAX_TOKENS = 48


@dataclass
class Answer:
    """One column: who answers, what has arrived, and when."""

    title: str
    adapter: str
    text: str = ""
    tokens: int = 0
    first_token: float = 0.0


async def answer(client: Client, prompt: str, column: Answer) -> None:
    """Streams one answer into its column."""
    started = time.perf_counter()
    messages = [{"role": "user", "content": prompt}]
    async for event in client.generate(
        messages, adapter=column.adapter, temperature=0, stop={"max_tokens": MAX_TOKENS}, timeout=120
    ):
        if event.HasField("delta"):
            column.first_token = column.first_token or time.perf_counter() - started
            column.text += event.delta.text
        elif event.HasField("finished"):
            column.tokens = event.finished.usage.completion_tokens


def shown(column: Answer) -> str:
    """An answer that was cut at the length limit ends with an ellipsis."""
    return column.text.rstrip() + (" …" if column.tokens == MAX_TOKENS else "")


@dataclass
class Board:
    """One picture: the prompt, the answers side by side, and a line below."""

    prompt: str
    columns: list[Answer]
    footer: str = ""

    def __rich__(self) -> Group:
        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in self.columns:
            grid.add_column(ratio=1)
        grid.add_row(*(Panel(Text(shown(c)), title=c.title, title_align="left") for c in self.columns))
        return Group(Text(f"> {self.prompt}", style="bold"), grid, Text(self.footer, style="dim"))


async def ask(client: Client, console: Console, prompt: str) -> tuple[int, float]:
    """All columns answer one prompt at once. Returns the tokens made and the seconds it took."""
    board = Board(prompt, [Answer("base model", ""), *(Answer(a.name, a.name) for a in ADAPTERS)])
    started = time.perf_counter()
    with Live(board, console=console, refresh_per_second=8):
        await asyncio.gather(*(answer(client, prompt, column) for column in board.columns))
        seconds = time.perf_counter() - started
        tokens = sum(column.tokens for column in board.columns)
        first = ", ".join(f"{column.first_token * 1e3:.0f}" for column in board.columns)
        board.footer = f"{tokens} tokens, {tokens / seconds:.0f} tokens/s; first tokens after {first} ms"
    console.print()
    return tokens, seconds


async def costs(client: Client, shapes: dict[str, LoraConfig], dtype: str) -> Table:
    """What each adapter takes in the slot pool: its true rank on the modules that it has, and no more."""
    loaded = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
    table = Table("adapter", "rank", "on", f"bytes in the slot pool ({dtype})", title="What each adapter costs")
    for adapter in sorted(loaded.adapters, key=lambda a: a.adapter_version):
        name = adapter.adapter_version.split("/")[3]
        table.add_row(name, str(adapter.rank), short(shapes[name]), f"{adapter.size_bytes:,}")
    return table


def short(shape: LoraConfig) -> str:
    """The linears that an adapter changes."""
    return ", ".join(name.removesuffix("_proj") for name in shape.target_modules)


async def demo(console: Console, folder: Path) -> None:
    started = time.perf_counter()
    with console.status("starting the registry and the inference service"):
        stack = await Stack(folder).__aenter__()
    try:
        async with stack.client() as client:
            console.print(f"both services are up after {time.perf_counter() - started:.1f} s")
            await wait_for_base_model(client)
            shapes: dict[str, LoraConfig] = {}
            for example in ADAPTERS:
                began = time.perf_counter()
                response = await register(client, example.name, f"file://examples/{example.name}")
                seconds = time.perf_counter() - began
                shape = shapes[example.name] = response.version.lora_config
                console.print(
                    f"registered {example.name} in {seconds * 1e3:.0f} ms: {example.effect} "
                    f"(rank {shape.rank} on {short(shape)})"
                )
            info = await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
            console.print(f"{info.base_model} ({info.architecture}) on {info.device}, {info.dtype}\n")
            results = [await ask(client, console, prompt) for prompt in PROMPTS]
            tokens, seconds = sum(r[0] for r in results), sum(r[1] for r in results)
            console.print(await costs(client, shapes, info.dtype))
            console.print(
                f"\n{tokens} tokens in {seconds:.1f} s: [bold]{tokens / seconds:.0f} tokens/s[/bold] over all"
            )
    finally:
        registry_code, inference_code = await stack.stop()
    console.print("both services have stopped")
    if (registry_code, inference_code) != (0, 0):
        raise SystemExit(f"exit codes: registry {registry_code}, inference {inference_code}")


def main() -> None:
    width = None if sys.stdout.isatty() else 120
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(width)
    except KeyboardInterrupt:
        sys.exit(130)
    except (InvalidArgument, NotServing) as error:
        raise SystemExit(f"error: {error}") from None


def run(width: int | None) -> None:
    """The demo in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="loraplex-demo-") as folder:
        asyncio.run(demo(Console(width=width), Path(folder)))


if __name__ == "__main__":
    main()
