"""`python -m tests.bench.served` (on a GPU): the whole stack through gRPC, on random weights of a shape.

Workload T: 256 clients stream at once, 512 tokens in, 128 out; output tokens a second, beside what the same engine
gives one client on its own socket, without API processes. Workload C: 32 base requests decode and one more arrives; the
worst gap between the messages of the 32 from then on, and the newcomer's first message: for the base model, an adapter
in a slot, one in host memory, one of which no file is in the cache. Also the time from the command to SERVING.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from examples.stack import Stack, register, wait_for_base_model
from inference_service.engine.client import EngineClient
from inference_service.launch import addresses
from inference_service.types import GenerateSpec, Sampling, SequenceDelta, Stop
from loraplex import Client
from loraplex.inference.v1 import control_pb2
from shared.base_model import MODULES, parse_config
from tests.bench.random_adapters import write_adapters
from tests.bench.shapes import SHAPES, write_model
from tests.bench.streams import Ask, ClientProcesses, prompt_of

CLIENT_PROCESSES = 16  # each one connection, hence one API process
RESIDENT = 10  # adapters that the device's arena holds
USED = tuple(range(8))  # in workload T
STAGED = (8, 9, 10)  # asked for before, pushed off the device since
COLD = (16, 17, 18)  # never asked for
NUM_ADAPTERS = 19
RANK = 16
DELAY = 0.5  # seconds until the first request, in which every client process connects


class Bench:
    """The clients of a running stack with registered adapters. `scale`: of T's tokens, for a trial without a GPU."""

    def __init__(self, stack: Stack, vocab_size: int, scale: float) -> None:
        assert stack.inference.process is not None
        self._clients = ClientProcesses(stack.inference.address, CLIENT_PROCESSES, vocab_size)
        self._engine_address = engine_address(stack.inference.process.pid)
        self._vocab_size = vocab_size
        self._scale = scale
        self._seeds = itertools.count(time.time_ns() % 1_000_000)  # no earlier prompt comes again

    async def connect(self) -> None:
        """Start all client processes: the first requests wait for their imports."""
        await self._clients.run(self.asks(4 * CLIENT_PROCESSES, 8, 2, ("",), 0.0))

    def asks(self, count: int, prompt: int, output: int, names: Sequence[str], at: float) -> list[Ask]:
        """Requests for `names` in turn."""
        return [Ask(names[number % len(names)], prompt, output, next(self._seeds), at) for number in range(count)]

    def workload_t(self, count: int, names: Sequence[str]) -> list[Ask]:
        """256 requests of 512 tokens in, 128 out."""
        return self.asks(count, int(512 * self._scale), int(128 * self._scale), names, time.monotonic() + DELAY)

    async def throughput(self, count: int, names: Sequence[str] = ("",)) -> float:
        """Output tokens a second of workload T, from the moment of sending to the last token."""
        seen = await self._clients.run(self.workload_t(count, names))
        assert all(len(each.arrivals) == each.ask.output for each in seen), {each.error for each in seen}
        return sum(each.ask.output for each in seen) / (max(each.arrivals[-1] for each in seen) - seen[0].ask.at)

    async def engine_throughput(self, count: int) -> float:
        """The same of the engine, on its own socket."""
        engine = EngineClient(self._engine_address, "bench")
        try:
            await engine.hello()
            asks = self.workload_t(count, ("",))
            await asyncio.gather(*(_stream(engine, ask, self._vocab_size) for ask in asks))
            return sum(ask.output for ask in asks) / (time.monotonic() - asks[0].at)
        finally:
            await engine.close()

    async def worst_gap(self, decoding: int, output: int, adapter: str) -> tuple[float, float]:
        """Workload C: milliseconds of the others' worst gap after the newcomer, and until its first token."""
        at = time.monotonic() + DELAY
        (newcomer,) = self.asks(1, 128, 32, (adapter,), at + 0.5)
        asks = [*self.asks(decoding, 128, output, ("",), at), newcomer]
        seen = await self._clients.run(asks, at_a_time=CLIENT_PROCESSES * len(asks))  # nobody waits for a turn
        (new,) = (each for each in seen if each.ask == newcomer)
        gaps = []
        for other in seen:
            meanwhile = [at for at in other.arrivals if new.sent - 0.1 <= at <= new.arrivals[-1]]
            assert len(meanwhile) > 1, "the others had ended before"
            gaps += [] if other is new else [after - before for before, after in pairwise(meanwhile)]
        return 1e3 * max(gaps), 1e3 * new.first_token_seconds

    def close(self) -> None:
        """End the client processes."""
        self._clients.close()


def engine_address(supervisor: int) -> str:
    """The engine's socket lies beside the lock file that the supervisor (its process id) holds open."""
    files = (descriptor.readlink() for descriptor in Path(f"/proc/{supervisor}/fd").iterdir())
    (lock,) = (file for file in files if file.name == "supervisor.lock")
    return addresses(lock.parent)[0]


async def _stream(engine: EngineClient, ask: Ask, vocab_size: int) -> None:
    await asyncio.sleep(ask.at - time.monotonic())
    spec = GenerateSpec(
        uuid.uuid4().hex, prompt_of(ask, vocab_size), Sampling(temperature=0.0), Stop(ask.output, ignore_eos=True),
        arrival=time.monotonic(),
    )  # fmt: skip
    count = 0
    async for event in engine.generate(spec):
        if isinstance(event, SequenceDelta):
            count += len(event.token_ids)
    assert count == ask.output


def name_of(number: int) -> str:
    """How the bench's adapters are called."""
    return f"bench-{number}"


async def _touch(client: Client, numbers: Sequence[int]) -> None:
    """One token from each adapter, one after the other."""
    stop = {"max_tokens": 1, "ignore_eos": True}
    for number in numbers:
        async for _ in client.generate([300 + number] * 8, adapter=name_of(number), temperature=0, stop=stop):
            pass


async def _loaded(client: Client) -> dict[str, int]:
    """Adapters by level, for the record."""
    levels: dict[str, int] = {}
    reply = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest(page_size=1000)))
    for adapter in reply.adapters:
        level = control_pb2.LoadedAdapter.Level.Name(adapter.level)
        levels[level] = levels.get(level, 0) + 1
    return levels


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the stack, measure what is asked for, and stop it."""
    shape = arguments.shape
    adapter_bytes = (folder / "adapters" / name_of(0) / "adapter_model.safetensors").stat().st_size
    flags = [
        f"--load-format={arguments.load_format}", f"--api-processes={arguments.api_processes}",
        "--max-num-seqs=256", "--max-batched-tokens=16384", "--max-model-len=4096",
        f"--adapter-memory={RESIDENT * adapter_bytes + (4 << 20)}", f"--host-memory={NUM_ADAPTERS * adapter_bytes}",
        *arguments.flag,
    ]  # fmt: skip
    stack = Stack(folder, flags=flags, model=folder / shape, roots={"bench": folder / "adapters"})
    started = time.monotonic()
    async with stack, stack.client() as client:
        rows = [_row("seconds to SERVING", [time.monotonic() - started])]
        await wait_for_base_model(client, f"baseModels/{shape}")
        for name in map(name_of, range(NUM_ADAPTERS)):
            await register(client, name, f"file://bench/{name}", f"baseModels/{shape}")
        bench = Bench(stack, SHAPES[shape]["vocab_size"], arguments.scale)
        try:
            await bench.connect()
            if "T" in arguments.loads:
                rows += await _workload_t(bench, client, arguments)
            if "C" in arguments.loads:
                rows += await _workload_c(bench, client, arguments.decode_tokens)
        finally:
            bench.close()
    return rows


async def _workload_t(bench: Bench, client: Client, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Base with no adapter on the device, the engine alone in between, then with adapters there, and in use."""
    count, rounds = arguments.requests, range(arguments.repeats + 1)  # the first one warms the clients up
    pairs = [(await bench.throughput(count), await bench.engine_throughput(count)) for _ in rounds][1:]
    rows = [
        _row("T, base, no adapter loaded: streams, tok/s", [streams for streams, _ in pairs]),
        _row("T, base, no adapter loaded: the engine's socket, tok/s", [engine for _, engine in pairs]),
        _row("T, base, no adapter loaded: share", [streams / engine for streams, engine in pairs]),
    ]
    await _touch(client, (*STAGED, *USED))
    values = [await bench.throughput(count) for _ in rounds][1:]
    rows.append(_row("T, base, adapters loaded: streams, tok/s", values))
    values = [await bench.throughput(count, [name_of(number) for number in USED]) for _ in rounds][1:]
    return [*rows, _row("T, 8 adapters: streams, tok/s", values)]


async def _workload_c(bench: Bench, client: Client, output: int) -> list[dict[str, Any]]:
    await _touch(client, (*STAGED, *USED, 14, 15))
    rows = [_row("adapters by level", await _loaded(client))]
    kinds = {"in a slot": (5, 6, 7), "in host memory": STAGED, "cold file": COLD}
    newcomers = {"base model": [""] * 4} | {kind: list(map(name_of, numbers)) for kind, numbers in kinds.items()}
    for kind, names in newcomers.items():
        values = [await bench.worst_gap(32, output, name) for name in names]
        rows.append(_row(f"C, {kind}: worst gap, ms", [gap for gap, _ in values]))
        rows.append(_row(f"C, {kind}: first token, ms", [first for _, first in values]))
    return rows


def _row(figure: str, values: Any) -> dict[str, Any]:
    """One line of the report, said at once."""
    print(figure, [round(value, 3) for value in values] if isinstance(values, list) else values, flush=True)
    return {"figure": figure, "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--loads", default="TC", help="which workloads")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "safetensors"))
    parser.add_argument("--api-processes", default=4, type=int)
    parser.add_argument("--requests", default=256, type=int)
    parser.add_argument("--repeats", default=2, type=int)
    parser.add_argument("--scale", default=1.0, type=float, help="of the tokens of a request in T")
    parser.add_argument("--decode-tokens", default=384, type=int, help="of the 32 requests in C")
    parser.add_argument("--folder", type=Path, help="keeps the model, the adapters and the cache for another run")
    parser.add_argument("--flag", action="append", default=[], help="more flags of the inference service")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        prepare_files(folder, arguments.shape, with_weights=arguments.load_format == "safetensors")
        rows = asyncio.run(measure(arguments, folder))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows))


def prepare_files(folder: Path, shape: str, *, with_weights: bool) -> None:
    """The model and the adapters, unless an earlier run has left them."""
    started = time.monotonic()
    model = folder / shape
    if not (model / "config.json").exists() or (with_weights and not list(model.glob("*.safetensors"))):
        write_model(model, shape, with_weights=with_weights)
    if not (folder / "adapters").exists():
        names = [name_of(number) for number in range(NUM_ADAPTERS)]
        write_adapters(folder / "adapters", names, parse_config(SHAPES[shape]), RANK, MODULES)
    print(f"files written in {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
