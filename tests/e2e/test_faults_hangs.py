"""Processes that stand still without ending, as in a deadlock or a kernel that never ends: they are replaced."""

import json
from pathlib import Path

import psutil
import pytest

from inference_service.hang_watch import LEAST_TIMEOUT
from tests.e2e.processes import Role, processes_of
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import PATIENCE_SECONDS, ask, assert_is_of, at_last, long_streams, refusal

# With which streams end that went through the process; the others go on.
REASONS: dict[Role, str] = {"engine": "ENGINE_UNAVAILABLE", "api": "UNAVAILABLE"}


@pytest.mark.slow  # the supervisor's own tests have it in a default run
@pytest.mark.parametrize("role", ["engine", "adapters", "api"])
async def test_a_frozen_process_is_replaced(world: TinyWorld, tmp_path: Path, role: Role) -> None:
    """Nobody watches this replica's metrics. A process that starts, and so does not answer yet, is let be."""
    flags = (f"--hang-timeout={LEAST_TIMEOUT}", "--metrics-listen=")
    content = world.contents[0]
    async with world.serving(tmp_path, *flags, names=[content]) as (stack, client):
        assert_is_of(world, content, 0, await ask(client, 0, content))
        streams = await long_streams(client, {"": ""})
        (frozen,) = processes_of(stack, role)
        frozen.suspend()
        psutil.wait_procs([frozen], timeout=PATIENCE_SECONDS)
        if role in REASONS:
            for stream in streams:
                assert (await refusal(stream.task)).reason == REASONS[role]
        else:
            for stream in streams:
                stream.task.cancel()
            await register_content(client, "new", world.contents[1])  # which needs an adapter process
            answer, _ = await at_last(lambda: ask(client, 1, "new"), PATIENCE_SECONDS)
            assert_is_of(world, world.contents[1], 1, answer)
        answer, _ = await at_last(lambda: ask(client, 0, content), PATIENCE_SECONDS)
        assert_is_of(world, content, 0, answer)
        log = stack.inference.log_tail(100_000)
    told = [json.loads(line)["message"] for line in log.splitlines() if '"level": "error"' in line]
    assert told == [f"the {role} process has not answered for {LEAST_TIMEOUT:g} seconds; it is killed"]
