"""Health on a port of its own, in the clear, beside a service that speaks TLS only: what Kubernetes' probes ask."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.stack import free_address
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from registry_service.config import RegistryConfig
from registry_service.server import SERVICE, start
from shared.errors import InvalidArgument
from tests.shared.auth.authority import Authority

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def settings(tmp_path):
    """Of a registry that speaks TLS, and Health in the clear."""
    served = Authority(tmp_path).issue("server", "localhost")
    return {
        "listen": "localhost:0",
        "database": f"sqlite:///{tmp_path}/registry.db",
        "tls_cert": str(served.cert),
        "tls_key": str(served.key),
        "health_listen": free_address(),
    }


async def check(stub, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return (await stub.Check(request, timeout=30, wait_for_ready=True)).status


async def test_probes_without_tls(settings):
    running = await start(RegistryConfig(**settings))
    async with grpc.aio.insecure_channel(settings["health_listen"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await check(stub) == SERVING
        assert await check(stub, SERVICE) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await AdapterRegistryServiceStub(channel).ListBaseModels(pb.ListBaseModelsRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        await running.stop()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_a_taken_address_is_told_and_nothing_is_left(settings):
    taken = free_address().replace("127.0.0.1", "localhost")  # nobody else takes it between two starts
    first = await start(RegistryConfig(**settings | {"listen": taken}))
    with pytest.raises(InvalidArgument, match="health_listen"):
        await start(RegistryConfig(**settings | {"health_listen": taken}))
    await first.stop()
    again = await start(RegistryConfig(**settings | {"listen": taken}))
    await again.stop()
