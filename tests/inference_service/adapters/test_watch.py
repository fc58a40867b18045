"""Answers follow the registry's watch, over a real gRPC server that says what it is told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inference_service.adapters.registry_client import RegistryClient
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.adapters.saved_answers import SavedAnswers
from loraplex.registry.v1 import registry_pb2
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
    """So many watches were asked for, of which the last is open."""
    async with asyncio.timeout(60):
        while len(registry.watch_requests) < count or registry.num_watches != 1:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


async def _asked_again(caplog: pytest.LogCaptureFixture, left: int = 0) -> None:
    """All answers of before were asked for again, and so many may still be gone."""
    async with asyncio.timeout(60):
        while not any(getattr(record, "left", None) == left for record in caplog.records):  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.01)
    caplog.clear()


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
    assert registry.min_revisions == [5, 5, 7, 7]  # where the watch began, and the change


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


async def test_a_version_or_alias_that_is_deleted_is_not_served_while_the_registry_is_away(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, first: ResolvedVersion, second: ResolvedVersion
) -> None:
    meanings = {"default/a": second, "default/a@1": first, "default/a@2": second, "default/a@prod": first}
    for name, version in meanings.items():
        registry.add(name, version, ttl=TTL)
        await client.resolve(name)
    registry.revision = 6
    registry.tell(6, "a", deleted_version=2)  # and no alias is left
    await _heard(client, 6)
    await registry.stop()
    clock.now += TTL + 1
    assert (await client.resolve("default/a@1")).number == 1
    for name in meanings.keys() - {"default/a@1"}:
        with pytest.raises(RegistryUnavailable):
            await client.resolve(name)


class _Listener:
    """Notes what it hears; it knows of adapters what a `residency.Residency` would be told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start_over(self) -> None:
        self.heard.append("start over")

    def changed(self, change: registry_pb2.AdapterChange) -> None:
        self.heard.append(change.adapter.name.rpartition("/")[2])

    def complete(self, revision: int) -> None:
        self.heard.append(f"complete {revision}")

    def failed(self) -> None:
        self.heard.append("failed")

    async def until(self, word: str) -> None:
        async with asyncio.timeout(60):
            while word not in self.heard:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.01)


@asynccontextmanager
async def _process(
    registry: FakeRegistry, path: Path, clock: _Clock
) -> AsyncIterator[tuple[RegistryClient, _Listener]]:
    """One adapter process: what it asks, hears and saves."""
    saved, listener = SavedAnswers(path, clock), _Listener()
    client = RegistryClient(f"127.0.0.1:{registry.port}", BASE_MODEL, max_stale=100.0, clock=clock, saved=saved)
    watching = asyncio.create_task(client.keep_watching(listener))
    try:
        yield client, listener
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()


async def test_the_watch_of_the_process_before_is_resumed(
    registry: FakeRegistry, tmp_path: Path, clock: _Clock, first: ResolvedVersion
) -> None:
    registry.is_watchable, registry.revision = True, 5
    for name in ("a", "changed", "gone"):
        named = first._replace(name=first.name.replace("/a/", f"/{name}/"))
        registry.add(f"default/{name}", named, ttl=TTL)
    registry.tell(5, is_complete=True, token="five")
    async with _process(registry, tmp_path / "answers", clock) as (client, listener):
        await listener.until("complete 5")
        for name in ("a", "changed", "gone"):
            await client.resolve(f"default/{name}")
    assert registry.watch_requests[0].snapshot_wanted_only
    clock.now += 99
    async with _process(registry, tmp_path / "answers", clock) as (client, listener):
        await _requests(registry, 2)
        registry.tell(8, "wanted", is_complete=True, token="not this one")
        await listener.until("complete 8")  # before anything that was missed
        await _requests(registry, 3)
        registry.tell(6, "gone", deleted=True, token="six")
        registry.to_watchers.put_nowait(Draining("in the middle"))
        await _requests(registry, 4)
        registry.tell(8, "changed", is_complete=True, token="eight")
        await _heard(client, 8)
        await registry.stop()
        clock.now += 2
        assert (await client.resolve("default/a")).number == 1  # right until a moment ago
        for name in ("changed", "gone"):  # right no later than 101 seconds ago
            with pytest.raises(RegistryUnavailable):
                await client.resolve(f"default/{name}")
    assert [request.resume_token for request in registry.watch_requests] == ["", "", "five", "six"]
    assert [request.snapshot_wanted_only for request in registry.watch_requests] == [True, True, False, False]
    assert listener.heard[:5] == ["start over", "wanted", "complete 8", "gone", "failed"]


async def test_where_the_watch_of_before_cannot_be_resumed_its_answers_are_asked_for_again(
    registry: FakeRegistry, tmp_path: Path, clock: _Clock, first: ResolvedVersion, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry.is_watchable, registry.revision = True, 5
    for name in ("a", "gone", "late"):
        registry.add(f"default/{name}", first._replace(name=first.name.replace("/a/", f"/{name}/")), ttl=TTL)
    registry.tell(5, is_complete=True, token="five")
    async with _process(registry, tmp_path / "answers", clock) as (client, listener):
        await listener.until("complete 5")
        for name in ("a", "gone", "late"):
            await client.resolve(f"default/{name}")
    clock.now += 99
    late, registry.answers["default/late"] = registry.answers["default/late"], SourceUnavailable("looked for")
    del registry.answers["default/gone"]
    registry.calls.clear()
    async with _process(registry, tmp_path / "answers", clock) as (client, listener):
        await _requests(registry, 2)
        registry.tell(3, "wanted", is_complete=True)
        await _requests(registry, 3)
        registry.to_watchers.put_nowait(WatchCompacted("another database"))
        await _requests(registry, 4)
        assert registry.watch_requests[3].snapshot_wanted_only
        assert not registry.calls  # there is no watch yet
        clock.now += 0.1
        registry.revision = 3
        registry.tell(3, "wanted", is_complete=True)
        await _asked_again(caplog, left=1)
        assert registry.calls == {"default/a": 1, "default/gone": 1, "default/late": 1}
        registry.answers["default/late"] = late
        clock.now += 2  # what failed is asked for again when that is not remembered any more
        await _asked_again(caplog)
        assert registry.calls == {"default/a": 1, "default/gone": 1, "default/late": 2}
        clock.now += TTL
        await registry.stop()
        for name in ("a", "late"):
            assert (await client.resolve(f"default/{name}")).number == 1
        with pytest.raises((AdapterNotFound, RegistryUnavailable)):
            await client.resolve("default/gone")


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


async def test_a_registry_that_drains_is_no_alarm_and_none_after_it_is_one(
    registry: FakeRegistry, client: RegistryClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry.tell(6, is_complete=True, token="six")
    await _heard(client, 6)
    registry.to_watchers.put_nowait(Draining("this registry ends"))
    await _requests(registry, 2)
    assert "this registry ends" in caplog.text
    assert "not watched" not in caplog.text
    registry.to_watchers.put_nowait(RegistryUnavailable("its database is away"))
    await _requests(registry, 3)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "adapters are not watched" in warning
    assert "its database is away" in warning


async def test_where_it_cannot_be_resumed_every_answer_is_asked_for_again(
    registry: FakeRegistry,
    client: RegistryClient,
    clock: _Clock,
    first: ResolvedVersion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    registry.add("default/a", first, ttl=TTL)
    await client.resolve("default/a")
    registry.tell(9, "a")
    await _heard(client, 9)
    registry.to_watchers.put_nowait(WatchCompacted("compacted"))
    await _requests(registry, 2)
    assert registry.watch_requests[1].resume_token == ""
    clock.now += 0.1
    registry.revision = 3  # a backup was restored
    registry.tell(3, is_complete=True)
    await _asked_again(caplog)
    for _ in range(2):
        await client.resolve("default/a")
    assert registry.calls["default/a"] == 2
    assert registry.min_revisions[-1] == 3


async def test_what_is_gone_where_a_watch_begins_anew_is_not_served_while_the_registry_is_away(
    registry: FakeRegistry,
    client: RegistryClient,
    clock: _Clock,
    first: ResolvedVersion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    gone = first._replace(name=first.name.replace("/a/", "/gone/"))
    registry.add("default/a", first, ttl=TTL)
    registry.add("default/gone", gone, ttl=TTL)
    for name in ("default/a", "default/gone"):
        await client.resolve(name)
    clock.now += TTL + 1
    registry.to_watchers.put_nowait(WatchCompacted("another database"))
    await _requests(registry, 2)
    clock.now += 0.1
    del registry.answers["default/gone"]
    registry.revision = 3
    registry.tell(3, is_complete=True)
    await _asked_again(caplog)
    assert registry.calls == {"default/a": 2, "default/gone": 2}
    await registry.stop()
    assert (await client.resolve("default/a")).number == 1
    with pytest.raises((AdapterNotFound, RegistryUnavailable)):
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
