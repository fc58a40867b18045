"""The registry client against a real gRPC server that comes and goes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2

from inference_service.adapters import registration
from inference_service.adapters.registration import BaseModelFacts
from inference_service.adapters.registry_client import RegistryClient
from inference_service.adapters.resolution import ResolvedVersion
from loraplex.registry.v1 import registry_pb2
from loraplex.registry.v1.registry_pb2_grpc import add_AdapterRegistryServiceServicer_to_server
from shared.errors import (
    AdapterNotFound,
    BaseModelConflict,
    BaseModelMismatch,
    BaseModelUnknown,
    Internal,
    RegistryUnavailable,
)
from shared.grpc_server import create_server
from tests.inference_service.adapters.fake_registry import FakeRegistry
from tests.inference_service.adapters.small_adapters import BASE_MODEL, version_of, write_adapter

FACTS = BaseModelFacts("tiny", "{}", BASE_MODEL.fingerprint, "sha256:weights")


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def version(tmp_path: Path) -> ResolvedVersion:
    write_adapter(tmp_path / "a")
    return version_of(tmp_path / "a")


@pytest.fixture
async def client(registry: FakeRegistry, clock: _Clock) -> AsyncIterator[RegistryClient]:
    client = RegistryClient(f"127.0.0.1:{registry.port}", BASE_MODEL, max_stale=100.0, clock=clock)
    yield client
    await client.close()


async def _eventually(is_true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await is_true():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)


async def test_an_answer_serves_for_its_ttl(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion
) -> None:
    registry.add("default/a", version, ttl=10)
    registry.delay = 0.05
    found = await asyncio.gather(*(client.resolve("default/a", str(i)) for i in range(5)))
    assert {v.digest for v in found} == {version.digest}
    clock.now += 9
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 1
    clock.now += 2
    await client.resolve("default/a")
    assert registry.calls["default/a"] == 2


@pytest.mark.parametrize("target", ["ipv4:127.0.0.1:1,127.0.0.1:{}", "dns:///127.0.0.1:{}", "127.0.0.1:{}"])
async def test_registries_are_where_a_target_says(
    registry: FakeRegistry, version: ResolvedVersion, target: str
) -> None:
    registry.add("default/a", version)
    client = RegistryClient(target.format(registry.port), BASE_MODEL)
    assert (await client.resolve("default/a")).digest == version.digest
    await client.close()


async def test_what_is_not_there_is_remembered_for_a_moment(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion
) -> None:
    for _ in range(3):
        with pytest.raises(AdapterNotFound):
            await client.resolve("default/a")
    assert registry.calls["default/a"] == 1
    registry.add("default/a", version, ttl=1)
    clock.now += 1.1
    await client.resolve("default/a")
    registry.answers["default/a"] = AdapterNotFound("deleted")
    clock.now += 1.1
    with pytest.raises(AdapterNotFound):
        await client.resolve("default/a")
    await registry.stop()
    clock.now += 1.1
    with pytest.raises(RegistryUnavailable):  # what was deleted does not come back as a stale answer
        await client.resolve("default/a")


async def test_errors_keep_their_type(registry: FakeRegistry, client: RegistryClient) -> None:
    registry.answers["default/a"] = BaseModelMismatch("for another", metadata={"base_model": "x"})
    with pytest.raises(BaseModelMismatch) as caught:
        await client.resolve("default/a")
    assert caught.value.metadata == {"base_model": "x"}
    registry.answers["default/b"] = RuntimeError("a bug")
    with pytest.raises(RegistryUnavailable, match="INTERNAL"):
        await client.resolve("default/b")


async def test_answers_outlive_the_registry_up_to_max_stale(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion
) -> None:
    registry.add("default/a", version, ttl=1)
    await client.resolve("default/a")
    await registry.stop()
    for _ in range(3):
        clock.now += 30
        assert (await client.resolve("default/a")).digest == version.digest
    with pytest.raises(RegistryUnavailable) as caught:
        await client.resolve("default/unknown")
    assert caught.value.retry_after
    clock.now += 30
    with pytest.raises(RegistryUnavailable):
        await client.resolve("default/a")
    newer = version._replace(name=version.name[:-1] + "2", number=2)
    registry.add("default/a", newer, ttl=1)
    await registry.start()

    async def is_new() -> bool:
        clock.now += 2
        try:
            return (await client.resolve("default/a")).number == 2
        except RegistryUnavailable:
            return False

    await _eventually(is_new)


async def test_a_registry_that_hangs_stalls_nobody(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion
) -> None:
    registry.add("default/a", version, ttl=1)
    await client.resolve("default/a")
    registry.delay = 60
    for _ in range(4):
        clock.now += 2
        async with asyncio.timeout(30):  # half as long as it hangs
            assert (await client.resolve("default/a")).number == 1
    assert registry.calls["default/a"] == 2
    with pytest.raises(RegistryUnavailable):
        await client.resolve("default/unknown")


async def test_a_slow_answer_arrives_in_the_background(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion
) -> None:
    registry.add("default/a", version, ttl=1)
    await client.resolve("default/a")
    newer = version._replace(name=version.name[:-1] + "2", number=2)
    registry.add("default/a", newer, ttl=1)
    registry.delay = 0.5
    clock.now += 2
    assert (await client.resolve("default/a")).number == 1

    async def is_new() -> bool:
        return (await client.resolve("default/a")).number == 2

    await _eventually(is_new)
    assert registry.calls["default/a"] == 2


async def test_a_malformed_answer_does_not_replace_a_good_one(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion
) -> None:
    registry.add("default/a", version, ttl=1)
    await client.resolve("default/a")
    registry.add("default/a", version._replace(name="rubbish"), ttl=1)
    clock.now += 2
    assert (await client.resolve("default/a")).name == version.name
    registry.add("default/b", version._replace(name="rubbish"), ttl=1)
    with pytest.raises(RegistryUnavailable, match="malformed"):
        await client.resolve("default/b")


@pytest.mark.parametrize("details", [b"\xff\xff", status_pb2.Status(code=3, message="other").SerializeToString()])
async def test_malformed_error_details_are_the_registry_s_failure(
    registry: FakeRegistry, client: RegistryClient, clock: _Clock, version: ResolvedVersion, details: bytes
) -> None:
    registry.add("default/a", version, ttl=1)
    await client.resolve("default/a")
    registry.raw_details = details
    clock.now += 2
    assert (await client.resolve("default/a")).digest == version.digest
    with pytest.raises(RegistryUnavailable):
        await client.resolve("default/b")
    task = asyncio.create_task(client.keep_registered(FACTS))

    async def is_unreachable() -> bool:
        return client.registration == "unreachable"

    await _eventually(is_unreachable)
    task.cancel()


async def test_the_base_model_is_registered_once_the_registry_is_there(
    registry: FakeRegistry, client: RegistryClient
) -> None:
    await registry.stop()
    task = asyncio.create_task(client.keep_registered(FACTS))

    async def is_unreachable() -> bool:
        return client.registration == "unreachable"

    async def is_registered() -> bool:
        return client.registration == "registered"

    await _eventually(is_unreachable)
    await registry.start()
    await _eventually(is_registered)
    assert registry.base_models[0].weights_fingerprint == "sha256:weights"
    task.cancel()


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (BaseModelConflict("another tiny"), "conflict"),
        (BaseModelMismatch("no"), "refused"),
        (Internal("x"), "unreachable"),
    ],
)
async def test_a_refused_base_model_is_a_state(
    registry: FakeRegistry, client: RegistryClient, error: Exception, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry.base_model_error = error  # type: ignore[assignment]
    task = asyncio.create_task(client.keep_registered(FACTS))

    async def has_state() -> bool:
        return client.registration == state

    await _eventually(has_state)
    assert ("tiny" in caplog.text) == (state != "unreachable")
    task.cancel()


CONFLICT = BaseModelConflict(
    "base model tiny is registered with weights_fingerprint sha256:theirs, not sha256:weights",
    metadata={"base_model": "baseModels/tiny"},
)


async def test_a_conflict_says_whose_fingerprints_differ_and_ends_when_the_base_model_is_taken(
    registry: FakeRegistry,
    client: RegistryClient,
    version: ResolvedVersion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(registration, "_SETTLED_DELAY", 0.05)
    registry.add("default/a", version)
    registry.base_model_error = CONFLICT
    async with _registering(client):
        await client.resolve("default/a")
        conflict = client.base_model_conflict
        assert conflict is not None, "known before the first answer"
        for told in ("sha256:theirs", "sha256:weights", "--model-name"):
            assert told in conflict.message
        served = {"served_fingerprint": BASE_MODEL.fingerprint, "served_weights_fingerprint": "sha256:weights"}
        assert conflict.metadata == {"base_model": "baseModels/tiny", **served}
        assert "BASE_MODEL_CONFLICT" in caplog.text
        await registry.stop()
        await _eventually(lambda: _is(client.registration == "unreachable"))
        assert client.base_model_conflict is not None, "nobody has said that it has ended"
        registry.base_model_error = None
        await registry.start()
        await _eventually(lambda: _is(client.base_model_conflict is None))
        assert client.registration == "registered"


async def test_a_conflict_is_known_before_the_first_answer_of_a_registry_that_was_away(
    registry: FakeRegistry,
    client: RegistryClient,
    clock: _Clock,
    version: ResolvedVersion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "_FIRST_DELAY", 30.0)  # a new attempt is far off
    registry.add("default/a", version)
    registry.base_model_error = CONFLICT
    await registry.stop()
    async with _registering(client):
        with pytest.raises(RegistryUnavailable):
            await client.resolve("default/a")
        assert (client.registration, client.base_model_conflict) == ("unreachable", None)
        await registry.start()
        clock.now += 10  # so that the failure is forgotten
        await _eventually(lambda: _resolves(client, clock, "default/a"))
        assert client.base_model_conflict is not None


async def test_a_registry_that_has_lost_its_database_is_told_the_base_model_at_once(
    registry: FakeRegistry, client: RegistryClient
) -> None:
    registry.report_error = BaseModelUnknown("base model tiny is not registered")
    async with _registering(client):
        await _eventually(lambda: _is(client.registration == "registered"))
        with pytest.raises(BaseModelUnknown):
            await client.report(registry_pb2.ReportReplicaStateRequest(replica="r", base_model="tiny"))
        await _eventually(lambda: _is(len(registry.base_models) == 2))


@asynccontextmanager
async def _registering(client: RegistryClient) -> AsyncIterator[None]:
    task = asyncio.create_task(client.keep_registered(FACTS))
    await asyncio.sleep(0)
    yield
    task.cancel()


async def _is(condition: bool) -> bool:
    return condition


async def _resolves(client: RegistryClient, clock: _Clock, reference: str) -> bool:
    try:
        await client.resolve(reference)
    except RegistryUnavailable:
        clock.now += 10
        return False
    return True


async def test_an_idle_connection_outlives_its_pings(version: ResolvedVersion) -> None:
    """gRPC pings at most once a second, and by default a server ends a connection at the third ping."""
    fake = FakeRegistry()
    fake.add("default/a", version)
    bound = await create_server(
        "127.0.0.1:0", lambda server: add_AdapterRegistryServiceServicer_to_server(fake, server), []
    )
    await bound.server.start()
    client = RegistryClient(f"127.0.0.1:{bound.port}", BASE_MODEL, keepalive=0.2)
    await client.resolve("default/a")
    channel = client._channel
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4.0):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    assert channel.get_state() is grpc.ChannelConnectivity.READY
    await client.close()
    await bound.server.stop(None)
