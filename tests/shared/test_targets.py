"""One rule for where servers are: the Python client, the command line, and a replica that is told of its registry."""

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_service import __main__ as inference
from loraplex import Client
from shared.channel import open_channel
from shared.errors import InvalidArgument
from shared.grpc_server import create_server
from shared.targets import grpc_target, is_target

TARGETS = [
    *("localhost:1", "10.0.0.1:65535", "[::1]:50051", "a-b.c_d:80"),
    *("dns:///a-b.c_d:80", "dns:a:80", "dns://10.0.0.53/a:80", "dns:///[::1]:80"),
    *("unix:/run/x", "unix:x", "unix:///run/x", "unix-abstract:x", "xds:///registry", "vsock:2:50051"),
    *("ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1,[fe80::1%eth0]:2"),
]
WRONG = [
    *("", "localhost", "a:b", ":1", "::1:5", "h:0", "h:65536", "h:٣", "a:1,b:2", "a b:1", "other:///a:1", "a://b:1"),
    *("dns:", "dns:///:80", "dns:///a", "dns:50051", "unix:", "unix://x", "xds:///", "xds:///a b", "unix-abstract:"),
    *("ipv4:", "ipv4:10.0.0.1", "ipv4:10.0.0.1:1,", "ipv4:10.0.0.1:0", "ipv4:a:1", "ipv4:[::1]:1", "ipv6:::1:1"),
]
URLS = ["http://localhost:50051", "https://localhost:50051", "HTTPS://h:1", "grpc://h:1", "grpcs://h:1", "http://h"]


@pytest.mark.parametrize("text", TARGETS)
async def test_targets(text: str) -> None:
    assert is_target(text) is None
    async with Client(text, text):
        pass


@pytest.mark.parametrize("text", [*WRONG, *URLS])
def test_what_is_none(text: str) -> None:
    expected = is_target(text)
    assert expected is not None
    assert expected.startswith("HOST:PORT, such as localhost:50051, or a gRPC target (dns:, ipv4:, ipv6:, unix:, ")
    with pytest.raises(InvalidArgument, match=r"registry: .* is not HOST:PORT"):
        Client("localhost:1", text)


@pytest.mark.parametrize("text", URLS)
def test_of_a_url_it_is_said_what_is_wrong(text: str) -> None:
    scheme = text.partition(":")[0]
    assert str(is_target(text)).endswith(
        f": leave {scheme}:// out; with a CA (`--ca`, `--registry-ca`) the connection is TLS"
    )


@pytest.mark.parametrize("text", TARGETS)
def test_only_an_address_is_resolved_by_dns(text: str) -> None:
    is_address = text in ("localhost:1", "10.0.0.1:65535", "[::1]:50051", "a-b.c_d:80")
    assert grpc_target(text) == (f"dns:///{text}" if is_address else text)


@pytest.mark.parametrize("target", ["ipv4:127.0.0.1:1,127.0.0.1:{}", "127.0.0.1:{}", "dns:127.0.0.1:{}"])
async def test_channels_go_by_it(target: str) -> None:
    bound = await create_server("127.0.0.1:0", lambda server: None, ["x"])
    await bound.server.start()
    async with open_channel(target.format(bound.port)) as channel:
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60, wait_for_ready=True)
    await bound.server.stop(None)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("text", ["https://registry:50051", "registry", "ipv4:registry:50051"])
def test_a_replica_refuses_what_is_none(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert inference.main(["--model", "any", "--registry", text]) == 2
    assert capfd.readouterr().err == f"error: --registry (flag): expected {is_target(text)}, is '{text}'\n"
