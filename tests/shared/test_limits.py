"""Limits of connections, calls, messages and tenants, and clients that do not read, at real servers."""

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inference_service import server
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from loraplex.registry.v1 import registry_pb2
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from registry_service.auto_registration import NamespaceSettings
from registry_service.config import RegistryConfig
from registry_service.server import start as start_registry
from shared.auth.caller import ANONYMOUS, Caller, granted
from shared.auth.settings import AccessSettings
from shared.auth.tenant_calls import TenantCalls
from shared.config import options
from shared.errors import ClientTooSlow, QueueFull, RateLimited, TenantQuota
from shared.limits import LimitSettings
from shared.rates import Rate, TenantBuckets
from shared.status import from_rpc_error
from tests.e2e import raw_http2 as http2
from tests.inference_service.serving_fakes import FakeAdapters, FakeEngine, byte_model, saying
from tests.shared.auth.matrix import bearer
from tests.shared.auth.token_files import write_callers

ALONE = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
)  # a connection of its own, of 64 KiB
INFO, GENERATE = pb.GetModelInfoRequest(), pb.GenerateRequest(text="Hi")
SECONDS = 20.0


class Served:
    """A server with an engine that says what it is told to, and channels to it."""

    def __init__(self, api, engine):
        self.engine = engine
        self.address = f"127.0.0.1:{api.port}"
        self._channels = []

    def connect(self):
        channel = grpc.aio.insecure_channel(self.address, ALONE)
        self._channels.append(channel)
        return channel

    def stub(self):
        return InferenceServiceStub(self.connect())

    async def close(self):
        for channel in self._channels:
            await channel.close()


@asynccontextmanager
async def serving(engine=None, access=None, tokens=None, requests=None, **limits):
    engine = engine or FakeEngine()
    api = await server.start(
        "127.0.0.1:0", byte_model(), engine, FakeAdapters(),
        limits=LimitSettings(**limits), access=access, tokens=tokens, requests=requests,
    )  # fmt: skip
    served = Served(api, engine)
    try:
        async with asyncio.timeout(4 * SECONDS):
            yield served
    finally:
        await served.close()
        await api.stop(0.0)


async def until(is_so):
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - it is the server that changes it
            await asyncio.sleep(0.01)


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    return from_rpc_error(caught.value)


async def test_more_connections_are_closed_and_room_is_given_again():
    async with serving(max_connections=2) as served:
        first, second, third = served.connect(), served.connect(), served.connect()
        for channel in (first, second):
            await InferenceServiceStub(channel).GetModelInfo(INFO, timeout=SECONDS)
        assert (await refused(InferenceServiceStub(third).GetModelInfo(INFO, timeout=SECONDS))).code == "UNAVAILABLE"
        await first.close()
        await InferenceServiceStub(third).GetModelInfo(INFO, timeout=SECONDS, wait_for_ready=True)
        await InferenceServiceStub(second).GetModelInfo(INFO, timeout=SECONDS)


async def test_a_client_keeps_back_more_streams_than_a_connection_has():
    engine = FakeEngine()
    engine.gate.clear()
    async with serving(engine, max_streams_per_connection=2) as served:
        stub = served.stub()
        await stub.GetModelInfo(INFO, timeout=SECONDS)  # until the server's settings are there a client knows no limit
        calls = [stub.Generate(GENERATE) for _ in range(3)]
        await until(lambda: len(engine.specs) == 2)
        await InferenceServiceStub(served.connect()).GetModelInfo(INFO, timeout=SECONDS)  # another has its own
        assert len(engine.specs) == 2
        engine.gate.set()
        for call in calls:
            assert [event.WhichOneof("event") async for event in call][-1] == "finished"


async def test_a_request_or_metadata_too_large_is_refused_by_name_of_the_code():
    async with serving(max_request_bytes=2048, max_metadata_bytes=2048) as served:
        stub = served.stub()
        large = pb.GenerateRequest(text="x" * 3000)
        assert (await refused(stub.Generate(large, timeout=SECONDS))).code == "RESOURCE_EXHAUSTED"
        call = stub.GetModelInfo(INFO, metadata=(("x-large", "x" * 3000),), timeout=SECONDS)
        assert (await refused(call)).code == "RESOURCE_EXHAUSTED"
        await stub.GetModelInfo(INFO, timeout=SECONDS)
        assert served.engine.specs == []


async def test_what_unpacks_to_more_than_a_request_may_be_is_refused():
    async with serving(max_request_bytes=1 << 16) as served:
        channel = grpc.aio.insecure_channel(served.address, ALONE, compression=grpc.Compression.Gzip)
        async with channel:
            bomb = pb.GenerateRequest(text="x" * (8 << 20))  # 8 KiB on the wire
            error = await refused(InferenceServiceStub(channel).Generate(bomb, timeout=SECONDS))
            assert error.code == "RESOURCE_EXHAUSTED"
            assert "Decompressed" in error.message
            await InferenceServiceStub(channel).GetModelInfo(INFO, timeout=SECONDS)
        assert served.engine.specs == []


@pytest.mark.parametrize(
    ("limit", "said"),
    [("handshake_seconds", b""), ("connection_idle_seconds", http2.PREFACE + http2.frame(http2.SETTINGS))],
)
async def test_a_connection_that_says_nothing_is_closed(limit, said):
    async with serving(**{limit: 0.2}) as served:
        connection = http2.RawConnection(served.address)
        connection.send(said)
        connection.socket.setblocking(False)
        async with asyncio.timeout(SECONDS):
            while await asyncio.get_running_loop().sock_recv(connection.socket, 1 << 16):
                pass
        connection.close()
        # Where the machine is busy a good connection may be too slow as well, and is made again.
        await served.stub().GetModelInfo(INFO, timeout=SECONDS, wait_for_ready=True)


async def test_a_connection_of_some_age_is_replaced_under_streams():
    engine = FakeEngine()
    async with serving(engine, connection_age_seconds=0.2) as served:
        channel = served.connect()
        engine.gate.clear()
        stream = InferenceServiceStub(channel).Generate(GENERATE)
        await until(lambda: engine.num_open == 1)
        for _ in range(8):
            await InferenceServiceStub(channel).GetModelInfo(INFO, timeout=SECONDS, wait_for_ready=True)
            await asyncio.sleep(0.05)
        engine.gate.set()
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"


async def test_a_process_takes_so_many_calls_and_always_probes():
    engine = FakeEngine()
    engine.gate.clear()
    async with serving(engine, max_calls=3) as served:
        stub, channel = served.stub(), served.connect()
        streams = [stub.Generate(GENERATE) for _ in range(2)]
        asked = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await asked.read()).list_services_response.service  # it stays open, and counts
        await until(lambda: engine.num_open == 2)
        for call in (stub.Generate(GENERATE), stub.GetModelInfo(INFO)):
            error = await refused(call)
            assert isinstance(error, QueueFull)
            assert error.retry_after
            assert error.metadata == {"limit": "calls", "value": "3"}
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert isinstance(await refused(watch), QueueFull)
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        streams[0].cancel()
        asked.cancel()
        await until(lambda: engine.num_open == 1)
        await stub.GetModelInfo(INFO, timeout=SECONDS)


async def test_a_tenants_calls_are_counted_by_the_token(tmp_path):
    access = AccessSettings(auth_token_file=str(write_callers(tmp_path / "tokens.toml")))
    engine = FakeEngine()
    engine.gate.clear()
    async with serving(engine, access, max_calls_per_tenant=1) as served:
        stub = served.stub()
        stream = stub.Generate(GENERATE, metadata=bearer("reader-a"))
        await until(lambda: engine.num_open == 1)
        error = await refused(stub.Generate(GENERATE, metadata=bearer("admin-a")))
        assert isinstance(error, TenantQuota)
        assert error.retry_after
        await stub.GetModelInfo(INFO, metadata=bearer("reader-all"), timeout=SECONDS)
        stream.cancel()
        await until_answered(lambda: stub.GetModelInfo(INFO, metadata=bearer("reader-a")))


async def until_answered(ask):
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                return await ask()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)


async def test_rates_of_calls_and_of_tokens():
    engine = FakeEngine(saying("hello"))
    slow = TenantBuckets(Rate(0.001, 2))
    async with serving(engine, requests=slow) as served:
        stub = served.stub()
        for _ in range(2):
            await stub.GetModelInfo(INFO, timeout=SECONDS)
        error = await refused(stub.GetModelInfo(INFO))
        assert isinstance(error, RateLimited)
        assert error.metadata == {"limit": "requests_per_second"}
        assert 500 < error.retry_after <= 1000
    async with serving(engine, tokens=TenantBuckets(Rate(0.01, 9))) as served:
        stub = served.stub()
        for _ in range(2):  # 2 of the prompt, 6 of the answer, each; the second leaves a debt of 7
            assert [event.WhichOneof("event") async for event in stub.Generate(GENERATE)][-1] == "finished"
        error = await refused(stub.Generate(GENERATE))
        assert isinstance(error, RateLimited)
        assert error.metadata == {"limit": "tokens_per_second"}
        assert 700 < error.retry_after <= 800
        await stub.GetModelInfo(INFO, timeout=SECONDS)


async def test_the_registrys_rate_is_of_its_namespaces_table(tmp_path):
    own = {"default": NamespaceSettings(requests_per_second=1000.0)}
    running = await start_registry(
        RegistryConfig(
            listen="127.0.0.1:0", database=f"sqlite:///{tmp_path}/registry.db", namespaces=own,
            auth_token_file=str(write_callers(tmp_path / "tokens.toml")), tenant_requests_per_second=0.001,
        )
    )  # fmt: skip
    request = registry_pb2.ListBaseModelsRequest()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            ask = AdapterRegistryServiceStub(channel).ListBaseModels
            await ask(request, metadata=bearer("reader-a"))
            assert isinstance(await refused(ask(request, metadata=bearer("reader-a"))), RateLimited)
            for _ in range(3):
                await ask(request, metadata=bearer("reader-all"))
                await ask(request, metadata=bearer("replica"))
    finally:
        await running.stop()


def test_replicas_are_counted_with_nobody():
    """They resolve for all tenants. Without authentication everybody has the role, and is counted."""

    class Context:
        def add_done_callback(self, _):
            pass

    calls = TenantCalls(2, TenantBuckets(Rate(0.001, 1)), clock=lambda: 0.0)
    replica = Caller("r", "default", granted((), ["replica"]), "token")
    for _ in range(3):
        calls.begin(replica, Context())
    calls.begin(ANONYMOUS, Context())
    with pytest.raises(RateLimited):
        calls.begin(ANONYMOUS, Context())


async def test_who_does_not_read_is_cut_and_told():
    engine = FakeEngine(saying("x" * 200_000, size=100, end="never"))
    async with serving(engine, slow_client_seconds=0.3) as served:
        stream = served.stub().Generate(pb.GenerateRequest(text="Hi", output={"token_ids": True, "logprobs": 1}))
        other = served.stub()
        await until(lambda: engine.specs)
        await until(lambda: engine.num_open == 0)  # what the engine holds is freed at once
        await other.GetModelInfo(INFO, timeout=SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # behind all that was sent before
            async for _ in stream:
                pass
        error = from_rpc_error(caught.value)
        assert isinstance(error, ClientTooSlow)
        assert error.metadata == {"seconds": "0.3"}


async def test_who_never_reads_counts_until_it_is_gone():
    """A window of no bytes: not even the status can be sent. The call counts, so that there cannot be ever more."""
    engine = FakeEngine(saying("x" * 200_000, size=1000, end="never"))
    async with serving(engine, slow_client_seconds=0.3, max_calls=2) as served:
        connections = [http2.RawConnection(served.address) for _ in range(2)]
        settings = http2.setting(http2.INITIAL_WINDOW_SIZE, 0)
        request = pb.GenerateRequest(text="Hi", output={"token_ids": True, "logprobs": 1})
        for connection in connections:
            connection.send(http2.PREFACE + settings + http2.generate_call(1, request))
        await until(lambda: len(engine.specs) == 2)
        await until(lambda: engine.num_open == 0)
        stub = served.stub()
        assert isinstance(await refused(stub.GetModelInfo(INFO)), QueueFull)
        for connection in connections:
            connection.close()
        await until_answered(lambda: stub.GetModelInfo(INFO))


def test_the_documentation_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    rows = re.findall(r"^\| `(--[\w-]+)` \| (\d+) \|", page.split("## The inference service")[0], re.MULTILINE)
    assert {flag: float(default) for flag, default in rows} == {
        option.flag: float(option.default) for option in options(LimitSettings)
    }
