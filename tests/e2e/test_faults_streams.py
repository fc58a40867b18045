"""A replica that was started without standard input and output, as some init systems and scripts do."""

from pathlib import Path

from loraplex import Client
from tests.e2e.tiny_stack import TinyWorld
from tests.e2e.traffic import ask, assert_is_of

WITHOUT = ("sh", "-c", 'exec "$@" <&- >&-', "sh")


async def test_a_replica_without_standard_input_and_output_serves(world: TinyWorld, tmp_path: Path) -> None:
    """It needs no registry for its base model."""
    stack = world.stack(tmp_path, "--residency-wait=0")
    replica = stack.another_replica(stack.inference.address, "inference", prefix=WITHOUT)
    await replica.start()
    try:
        await replica.ready(60)
        async with Client(replica.address, stack.registry.address) as client:
            assert_is_of(world, "", 0, await ask(client, 0, ""))
    finally:
        code = await replica.stop()
    assert code == 0, replica.log_tail(40)
    assert "starting it again" not in replica.log_tail(1000)
