"""Both services whose log cannot be written: they serve, restart what dies, and end when they are told to."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from examples.stack import wait_for_base_model
from tests.e2e.processes import kill, processes_of
from tests.e2e.tiny_stack import BASE, TinyWorld, register_content
from tests.e2e.traffic import PATIENCE_SECONDS, ask, assert_is_of, at_last

EASIER = ("full disk", "no reader")  # than a pipe whose writer waits for ever


@contextmanager
def spoiled(log: Path, trouble: str) -> Iterator[None]:
    """`log` is there, and what is written to it is lost, or its writer waits for ever."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if trouble == "full disk":
        log.symlink_to("/dev/full")
        yield
        return
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while trouble == "full pipe":
            os.write(writer, b"." * (1 << 16))
    try:
        yield
    finally:
        os.close(reader)
        os.close(writer)


# The supervisor's own tests take all of them in a default run.
@pytest.mark.parametrize("trouble", [*(pytest.param(each, marks=pytest.mark.slow) for each in EASIER), "full pipe"])
async def test_a_log_that_cannot_be_written_stops_nothing(world: TinyWorld, tmp_path: Path, trouble: str) -> None:
    stack, content = world.stack(tmp_path), world.contents[0]
    with ExitStack() as logs:
        for service, name in ((stack.registry, "registry"), (stack.inference, "inference")):
            service.log_tail = lambda lines=15: "which cannot be read"
            logs.enter_context(spoiled(tmp_path / f"{name}.log", trouble))
        try:
            await stack.start()
            if trouble == "no reader":
                logs.close()
            async with stack.client() as client:
                await wait_for_base_model(client, BASE)
                await register_content(client, "told-of", content)
                await ask(client, 0, "told-of")
                for role in ("engine", "adapters", "api"):
                    (process,) = processes_of(stack, role)
                    kill(process)
                    psutil.wait_procs([process])
                    answer, _ = await at_last(lambda: ask(client, 0, "told-of"), PATIENCE_SECONDS)
                    assert_is_of(world, content, 0, answer)
        finally:
            codes = await stack.stop()
    assert codes == (0, 0)
