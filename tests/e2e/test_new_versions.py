"""Adapters change under load: who runs finishes on the old weights, who comes gets the new, and no old KV is reused."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import pytest_asyncio

from loraplex import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import AdapterNotFound
from tests.e2e.tiny_stack import PROMPTS, TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, long_stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESIDENT = {"": "", "content-0": "content-0"}
LONG_PROMPT = max(range(len(PROMPTS)), key=lambda number: len(PROMPTS[number]))  # of several KV blocks
SWITCH_SECONDS = 60.0
REGISTRY_FLAGS = ["--resolve-ttl-seconds=600"]  # answers are good for so long: the watch must tell


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    run = tmp_path_factory.mktemp("versions")
    async with world.serving(run, names=["content-0"], registry_flags=REGISTRY_FLAGS) as (_, client):
        yield client


async def point(client: Client, adapter: str, version: int) -> None:
    target = resources_pb2.AliasTarget(version=version, weight=1)
    name = f"namespaces/default/adapters/{adapter}/aliases/prod"
    request = registry_pb2.SetAdapterAliasRequest(name=name, targets=[target])
    await client.call(client.registry.SetAdapterAlias(request))


async def switched(client: Client, reference: str, version: int) -> float:
    """Seconds until requests for `reference` are answered by this version, and none by another after it."""
    started = time.monotonic()
    while not (await started_of(client, reference)).adapter_version.endswith(f"/{version}"):
        assert time.monotonic() < started + SWITCH_SECONDS
        await asyncio.sleep(0.01)
    seconds = time.monotonic() - started
    for _ in range(5):
        assert (await started_of(client, reference)).adapter_version.endswith(f"/{version}")
    return seconds


async def started_of(client: Client, reference: str) -> Any:
    return (await ask(client, 0, reference, tokens=1)).started


async def test_latest_and_alias_move_under_running_streams(world: TinyWorld, client: Client) -> None:
    old, new = world.contents[2:4]

    async def register_new(adapter: str) -> None:
        await register_content(client, adapter, new)

    async def move(reference: str, change: Callable[[], Coroutine[Any, Any, None]], back: bool) -> float:
        before, after = (new, old) if back else (old, new)
        cached = [await ask(client, LONG_PROMPT, reference) for _ in range(2)]
        assert cached[1].started is not None
        assert cached[1].started.cached_tokens >= 16
        running = [await long_stream(client, before, reference, prompt, tokens=200) for prompt in range(2)]
        await change()
        seconds = await switched(client, reference, 1 if back else 2)
        answer = await ask(client, LONG_PROMPT, reference)
        assert_is_of(world, after, LONG_PROMPT, answer)
        assert answer.token_ids != cached[0].token_ids
        for stream in running:
            await stream.check(world)
        again = await ask(client, LONG_PROMPT, reference)
        assert again.token_ids == answer.token_ids
        return seconds

    async with Traffic(world, client, RESIDENT) as traffic:
        await register_content(client, "moving", old)
        await point(client, "moving", 1)
        latest = await move("moving", lambda: register_new("moving"), back=False)
        for pinned in ("moving@prod", "moving@1"):  # neither of them follows the latest
            assert (await started_of(client, pinned)).adapter_version.endswith("/1")
        forwards = await move("moving@prod", lambda: point(client, "moving", 2), back=False)
        backwards = await move("moving@prod", lambda: point(client, "moving", 1), back=True)
        await traffic.answers(4)
    print(f"switched after {latest:.2f} s (latest), {forwards:.2f} s (alias), {backwards:.2f} s (alias, back)")


async def test_a_deleted_adapter_under_running_streams(world: TinyWorld, client: Client) -> None:
    """It is refused from a moment later on, its streams end whole, and undeleted it is what it was."""
    content, name = world.contents[1], "namespaces/default/adapters/brief"
    async with Traffic(world, client, RESIDENT):
        await register_content(client, "brief", content)
        await ask(client, 0, "brief")
        streams = [await long_stream(client, content, reference) for reference in ("brief", "brief@1")]
        await client.call(client.registry.DeleteAdapter(registry_pb2.DeleteAdapterRequest(name=name)))
        deleted = time.monotonic()
        while await is_served(client, "brief"):
            assert time.monotonic() < deleted + SWITCH_SECONDS
        seconds = time.monotonic() - deleted
        for stream in streams:
            await stream.check(world)
        assert not await is_served(client, "brief@1")
        await client.call(client.registry.UndeleteAdapter(registry_pb2.UndeleteAdapterRequest(name=name)))
        undeleted = time.monotonic()
        while not await is_served(client, "brief"):
            assert time.monotonic() < undeleted + SWITCH_SECONDS
        print(f"refused after {seconds:.2f} s, back after {time.monotonic() - undeleted:.2f} s", end="; ")
        assert_is_of(world, content, 1, await ask(client, 1, "brief"))


async def is_served(client: Client, reference: str) -> bool:
    try:
        await ask(client, 0, reference, tokens=1)
    except AdapterNotFound:
        return False
    return True


async def test_a_prompt_cached_under_the_old_version_is_computed_anew(world: TinyWorld, client: Client) -> None:
    contents = world.contents[4:9]
    async with Traffic(world, client, RESIDENT):
        for number, content in enumerate(contents, 1):
            await register_content(client, "renewed", content)
            for repeat in range(3):
                answer = await ask(client, LONG_PROMPT, f"renewed@{number}", tokens=24)
                assert answer.started is not None
                assert (answer.started.cached_tokens > 0) == (repeat > 0)
                assert_is_of(world, content, LONG_PROMPT, answer)
        for number, content in enumerate(contents, 1):
            answer = await ask(client, LONG_PROMPT, f"renewed@{number}", tokens=24)
            assert_is_of(world, content, LONG_PROMPT, answer)


async def test_versions_that_pour_in_never_mix(world: TinyWorld, client: Client) -> None:
    """Each answer is that of the version it names, while a version comes every moment."""
    contents = world.contents[9:19]
    by_version: dict[str, str] = {}
    is_over = False

    async def keep_asking(prompt: int) -> int:
        seen = []
        while not is_over:
            answer = await ask(client, prompt, "pouring")
            assert answer.started is not None
            assert_is_of(world, by_version[answer.started.adapter_version], prompt, answer)
            seen.append(int(answer.started.adapter_version.rpartition("/")[2]))
        assert seen == sorted(seen)
        return len(set(seen))

    response = await register_content(client, "pouring", contents[0])
    by_version[response.version.name] = contents[0]
    async with Traffic(world, client, RESIDENT):
        askers = [asyncio.create_task(keep_asking(prompt)) for prompt in range(len(PROMPTS))]
        for number, content in enumerate(contents[1:], 2):
            by_version[f"namespaces/default/adapters/pouring/versions/{number}"] = content
            await register_content(client, "pouring", content)
            await asyncio.sleep(0.2)
        seconds = await switched(client, "pouring", len(contents))
        is_over = True
        num_seen = await asyncio.gather(*askers)
    print(f"{num_seen} of {len(contents)} versions seen, the last {seconds:.2f} s after it came")
    assert min(num_seen) > 1
