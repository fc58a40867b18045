"""`make serve`: both services stay up until Ctrl-C, with the example adapters registered."""

import argparse
import asyncio
import signal

from rich.console import Console

from examples.prompts import ADAPTERS
from examples.stack import ROOT, NotServing, Stack, register, wait_for_base_model
from shared.errors import InvalidArgument
from shared.listening import check_ports

REGISTRY, INFERENCE, METRICS = "127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:50054"

NEXT = """
[bold]Both services are up.[/bold] Registry {registry}, inference {inference}; logs in {folder}. Ctrl-C stops them.
Try in another terminal:

  .venv/bin/loraplex adapter list
  .venv/bin/loraplex generate --chat --max-tokens 60 --temperature 0 "What is the capital of France?"
  .venv/bin/loraplex generate --chat --max-tokens 60 --temperature 0 --adapter {first} "What is the capital of France?"
  .venv/bin/loraplex adapter register mine --base-model smollm2-135m-instruct --source file://examples/{first}
  .venv/bin/loraplex status
  curl http://{metrics}/metrics
"""


async def serve(registry: str, inference: str, metrics: str) -> None:
    console = Console()
    folder = ROOT / "var" / "serve"
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    check_ports({"registry": registry, "inference": inference, "metrics": metrics})
    stack = Stack(folder, registry=registry, inference=inference, flags=[f"--metrics-listen={metrics}"])
    starting = asyncio.ensure_future(start(console, stack))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        await starting
        text = NEXT.format(
            registry=registry, inference=inference, metrics=metrics, folder=folder, first=ADAPTERS[0].name
        )
        console.print(text, highlight=False, soft_wrap=True)
        services = {"registry": stack.registry, "inference service": stack.inference}
        ended = {asyncio.ensure_future(each.process.wait()): name for name, each in services.items() if each.process}
        done, _ = await asyncio.wait([stopping, *ended], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            name = next(name for task, name in ended.items() if task in done)
            raise NotServing(f"the {name} ended by itself: {services[name].last_words()}")
    finally:
        starting.cancel()
        with console.status("stopping; running streams have a while to finish"):
            await stack.stop()
        console.print("both services have stopped")


async def start(console: Console, stack: Stack) -> None:
    """Both services up, the example adapters registered."""
    with console.status("starting the registry and the inference service"):
        await stack.start()
    async with stack.client() as client:
        await wait_for_base_model(client)
        for example in ADAPTERS:
            await register(client, example.name, f"file://examples/{example.name}", description=example.effect)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", default=REGISTRY, help="address of the registry service")
    parser.add_argument("--inference", default=INFERENCE, help="address of the inference service")
    parser.add_argument("--metrics", default=METRICS, help="address of the replica's metrics")
    arguments = parser.parse_args()
    try:
        asyncio.run(serve(arguments.registry, arguments.inference, arguments.metrics))
    except InvalidArgument as error:
        raise SystemExit(f"error: --{error.message}") from None
    except NotServing as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
