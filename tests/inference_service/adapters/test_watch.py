"""Answers follow the registry's watch, over a real gRPC server that says what it is told to."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference_service.adapters.registry_client import RegistryClient
from inference_service.adapters.resolution import ResolvedVersion
from shared.errors import AdapterNotFound, Draining, QueueFull, RegistryUnavailable, SourceUnavailable, WatchCompacted
from tests.inference_service.adapters.fake_registry import FakeRegistry
from tests.inference_service.adapters.small_adapters import BASE_MODEL, version_of, write_adapter

TTL = 10.0


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def first(tmp_path: Path) -> ResolvedVersion:
    write_adapter(tmp_path / "a")
    return version_of(tmp_path / "a")


@pytest.fixture
def second(first: ResolvedVersion) -> ResolvedVersion:
    return first._replace(name=first.name[:-1] + "2", number=2)


@pytest.fixture
async def client(registry: FakeRegistry, clock: _Clock) -> AsyncIterator[RegistryClient]:
    """Watches from revision 5 on."""
    registry.is_watchable, registry.revision = True, 5
    registry.tell(5, is_complete=True)
    client = RegistryClient(f"127.0.0.1:{registry.port}", BASE_MODEL, max_stale=100.0, clock=clock)
    watching = asyncio.create_task(client.keep_watching())
    await _heard(client, 5)
    yield client
    watching.cancel()
    await client.close()


async def _heard(client: RegistryClient, revision: int) -> None:
    async with asyncio.timeout(60):
        while client.revision < revision:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


async def _requests(registry: FakeRegistry, count: int) -> None:
    async with asyncio.timeout(60):
        while len(registry.watch_requests) < count:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


async def test_while_the_watch_is_heard_nothing_is_asked_again(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, first: ResolvedVersion
) -> None:
    registry.add("default/a", first, ttl=TTL)
    for revision in range(6, 12):
        await client.resolve("default/a")
        clock.now += TTL - 1
        registry.tell(revision)
        await _heard(client, revision)
    assert registry.calls["default/a"] == 1
    assert registry.watch_requests[0].base_model == "tiny"
    assert registry.watch_requests[0].skip_snapshot
    clock.now += TTL + 1  # silence
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 2


async def test_a_change_counts_at_once(
    registry: FakeRegistry, client: RegistryClient, first: ResolvedVersion, second: ResolvedVersion
) -> None:
    for name in ("default/a", "default/a@latest"):
        registry.add(name, first, ttl=TTL)
    assert (await client.resolve("default/a")).number == (await client.resolve("default/a@latest")).number == 1
    for name in ("default/a", "default/a@latest"):
        registry.add(name, second, ttl=TTL)
    registry.revision = 7
    registry.tell(6, "other")
    registry.tell(7, "a")
    await _heard(client, 7)
    for _ in range(2):
        assert (await client.resolve("default/a")).number == (await client.resolve("default/a@latest")).number == 2
    assert registry.calls == {"default/a": 2, "default/a@latest": 2}
    assert registry.min_revisions == [0, 0, 7, 7]


async def test_an_answer_that_was_under_way_is_not_believed(
    registry: FakeRegistry, client: RegistryClient, first: ResolvedVersion, second: ResolvedVersion
) -> None:
    registry.add("default/a", first, ttl=TTL)
    registry.delay = 0.5
    asking = asyncio.create_task(client.resolve("default/a"))
    async with asyncio.timeout(60):
        while not registry.calls["default/a"]:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
    registry.add("default/a", second, ttl=TTL)
    registry.revision = 6
    registry.tell(6, "a")
    await _heard(client, 6)
    registry.delay = 0.0
    assert (await client.resolve("default/a")).number == 2
    assert (await asking).number == 1
    assert (await client.resolve("default/a")).number == 2


async def test_what_is_registered_is_there_at_once(
    registry: FakeRegistry, client: RegistryClient, first: ResolvedVersion
) -> None:
    with pytest.raises(AdapterNotFound):
        await client.resolve("default/a")
    registry.add("default/a", first, ttl=TTL)
    registry.revision = 6
    registry.tell(6, "a")
    await _heard(client, 6)
    assert (await client.resolve("default/a")).number == 1


async def test_what_is_deleted_is_refused_at_once(
    registry: FakeRegistry, client: RegistryClient, first: ResolvedVersion
) -> None:
    registry.add("default/a", first, ttl=TTL)
    await client.resolve("default/a")
    registry.answers["default/a"] = AdapterNotFound("deleted")
    registry.revision = 6
    registry.tell(6, "a", deleted=True)
    await _heard(client, 6)
    with pytest.raises(AdapterNotFound):
        await client.resolve("default/a")
    await registry.stop()
    with pytest.raises((AdapterNotFound, RegistryUnavailable)):
        await client.resolve("default/a")


async def test_a_watch_is_resumed_where_it_broke_off(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, first: ResolvedVersion
) -> None:
    registry.add("default/a", first, ttl=TTL)
    await client.resolve("default/a")
    registry.tell(6, token="six")
    await _heard(client, 6)
    registry.to_watchers.put_nowait(Draining("ends"))
    await _requests(registry, 2)
    assert registry.watch_requests[1].resume_token == "six"
    clock.now += TTL + 1
    registry.tell(7)  # not all of what was missed
    await _heard(client, 6)
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 2
    registry.tell(8, is_complete=True)
    await _heard(client, 8)
    for revision in range(9, 12):
        clock.now += TTL - 1
        registry.tell(revision)
        await _heard(client, revision)
        await client.resolve("default/a")
    assert registry.calls["default/a"] == 2


async def test_where_it_cannot_be_resumed_every_answer_is_asked_for_again(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, first: ResolvedVersion
) -> None:
    registry.add("default/a", first, ttl=TTL)
    await client.resolve("default/a")
    registry.tell(9, "a")
    await _heard(client, 9)
    registry.to_watchers.put_nowait(WatchCompacted("compacted"))
    await _requests(registry, 2)
    assert registry.watch_requests[1].resume_token == ""
    registry.revision = 3  # a backup was restored
    registry.tell(3, is_complete=True)
    await _heard(client, 3)
    clock.now += 0.1
    for _ in range(2):
        await client.resolve("default/a")
    assert registry.calls["default/a"] == 2
    assert registry.min_revisions[-1] == 0


async def test_what_a_new_watch_does_not_confirm_is_not_served_while_the_registry_is_away(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, first: ResolvedVersion
) -> None:
    gone = first._replace(name=first.name.replace("/a/", "/gone/"))
    registry.add("default/a", first, ttl=TTL)
    registry.add("default/gone", gone, ttl=TTL)
    for name in ("default/a", "default/gone"):
        await client.resolve(name)
    clock.now += TTL + 1
    registry.to_watchers.put_nowait(WatchCompacted("another database"))
    await _requests(registry, 2)
    request = registry.watch_requests[1]
    assert (request.skip_snapshot, request.snapshot_wanted_only) == (False, False)  # all of it
    registry.revision = 3
    registry.tell(3, "a", is_complete=True, versions=[first])
    await _heard(client, 3)
    await registry.stop()
    assert (await client.resolve("default/a")).number == 1
    with pytest.raises(RegistryUnavailable):
        await client.resolve("default/gone")


async def test_without_a_watch_answers_serve_for_their_ttl(
    registry: FakeRegistry, clock: _Clock, first: ResolvedVersion
) -> None:
    registry.add("default/a", first, ttl=TTL)
    client = RegistryClient(f"127.0.0.1:{registry.port}", BASE_MODEL, clock=clock)
    watching = asyncio.create_task(client.keep_watching())
    await client.resolve("default/a")
    clock.now += TTL - 1
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 1
    clock.now += 2
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 2
    assert not watching.done()
    watching.cancel()
    await client.close()


@pytest.mark.parametrize("error", [SourceUnavailable("being registered", retry_after=1.0), QueueFull("too many")])
async def test_a_registry_that_cannot_say_yet_is_not_unreachable(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, first: ResolvedVersion, error: Exception
) -> None:
    registry.add("default/a", first, ttl=TTL)
    await client.resolve("default/a")
    registry.answers["default/new"] = error
    with pytest.raises(type(error)):
        await client.resolve("default/new")
    clock.now += TTL + 1
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 2  # it would not be asked for at once if the registry counted as away
