"""TLS and mTLS on real sockets: who is known by a certificate, and certificates replaced under open streams."""

import asyncio
import os
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_service import server
from loraplex.client import Client
from loraplex.inference.v1 import control_pb2, inference_pb2
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from registry_service.config import RegistryConfig
from registry_service.server import SERVICE, start
from shared.auth.certificates import CertificateIdentity
from shared.auth.settings import AccessSettings
from shared.channel import ClientIdentity, open_channel
from shared.errors import AdapterNotFound, InvalidArgument, LoraplexError, PermissionDenied, Unauthenticated
from shared.tls import client_credentials, server_credentials
from tests.inference_service.serving_fakes import FakeAdapters, FakeEngine, byte_model
from tests.shared.auth.authority import Authority, Files, Issuer
from tests.shared.auth.token_files import token, write_callers

LOCAL_POOL = (("grpc.use_local_subchannel_pool", 1),)
REPLICA = "spiffe://cluster.local/ns/serving/sa/replica"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def settings(tmp_path, authority):
    """Of a registry that speaks TLS."""
    served = authority.issue("server", "localhost")
    return {
        "listen": "localhost:0",
        "database": f"sqlite:///{tmp_path}/registry.db",
        "resolve_ttl_seconds": 0.3,
        "tls_cert": str(served.cert),
        "tls_key": str(served.key),
    }


@pytest.fixture
async def serve():
    """Starts registries; the target of each."""
    running = []

    async def started(**settings):
        running.append(await start(RegistryConfig(**settings)))
        return f"localhost:{running[-1].port}"

    yield started
    for registry in running:
        await registry.stop()


async def models(target, identity):
    """Whether the caller may list base models; the error if not."""
    async with Client(registry=target, identity=identity) as client:
        request = pb.ListBaseModelsRequest()
        return await client.call(client.registry.ListBaseModels(request, timeout=30))


async def test_tokens_over_tls(serve, settings, authority, tmp_path):
    target = await serve(**settings, auth_token_file=str(write_callers(tmp_path / "tokens.toml")))
    ca = str(authority.cert)
    await models(target, ClientIdentity(token=token("reader-a"), ca=ca))
    (tmp_path / "mine").write_text(token("reader-a") + "\n")
    await models(target, ClientIdentity(token_file=str(tmp_path / "mine"), ca=ca))
    with pytest.raises(Unauthenticated):
        await models(target, ClientIdentity(ca=ca))
    stranger = Authority(tmp_path, "stranger")
    with pytest.raises(LoraplexError) as caught:  # in plaintext
        await models(target, ClientIdentity(token=token("reader-a")))
    assert caught.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    with pytest.raises(LoraplexError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        await models(target, ClientIdentity(ca=str(stranger.cert)))
    assert (caught.value.code, caught.value.retry_after) == ("UNAVAILABLE", None)


async def test_json_web_tokens_and_health_which_is_open(serve, settings, authority, tmp_path):
    issuer = Issuer(tmp_path / "jwks.json")
    wanted = {"auth_jwt_issuer": issuer.NAME, "auth_jwt_audience": issuer.AUDIENCE}
    target = await serve(**settings, auth_jwks_file=str(issuer.jwks), **wanted)
    ca = str(authority.cert)
    await models(target, ClientIdentity(token=issuer.token(), ca=ca))
    with pytest.raises(Unauthenticated, match="another audience"):
        await models(target, ClientIdentity(token=issuer.token(aud="other"), ca=ca))
    async with open_channel(target, ClientIdentity(ca=ca)) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_callers_known_by_their_certificates(serve, settings, authority, tmp_path):
    known = {
        "replica": CertificateIdentity(identity=REPLICA, roles=("replica",)),
        "ops": CertificateIdentity(identity="CN=ops", roles=("reader",), namespaces=("team-a",)),
    }
    target = await serve(**settings, tls_client_ca=str(authority.cert), auth_certificates=known)

    def shown(files):
        return ClientIdentity(ca=str(authority.cert), cert=str(files.cert), key=str(files.key))

    replica, ops, other = authority.issue("r1", REPLICA), authority.issue("ops"), authority.issue("other", "x.example")
    await models(target, shown(replica))
    await models(target, shown(ops))
    async with Client(registry=target, identity=shown(ops)) as client:
        with pytest.raises(PermissionDenied):
            await client.call(client.registry.ReportReplicaState(pb.ReportReplicaStateRequest(replica="r")))
        with pytest.raises(AdapterNotFound):
            await client.call(client.registry.GetAdapter(pb.GetAdapterRequest(name="team-b/a")))
    with pytest.raises(Unauthenticated):
        await models(target, shown(other))
    forged = Authority(tmp_path, "forger").issue("forged", REPLICA)
    for identity in (shown(forged), ClientIdentity(ca=str(authority.cert))):
        with pytest.raises(LoraplexError) as caught:  # the connection does not come about
            await models(target, identity)
        assert caught.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


async def test_a_certificate_is_replaced_under_an_open_stream(serve, settings, authority, tmp_path):
    target = await serve(**settings)
    old = authority.cert
    identity = ClientIdentity(ca=str(old))
    async with open_channel(target, identity, LOCAL_POOL) as channel:
        watch = AdapterRegistryServiceStub(channel).WatchAdapters(pb.WatchAdaptersRequest(parent="namespaces/-"))
        await watch.read()
        fresh = Authority(tmp_path, "next")
        issued = fresh.issue("fresh", "localhost")
        # The certificate comes first; until its key is there, the old pair serves.
        os.replace(issued.cert, settings["tls_cert"])  # noqa: PTH105
        await asyncio.sleep(1.1)
        await answered(target, identity)
        os.replace(issued.key, settings["tls_key"])  # noqa: PTH105
        deadline = time.monotonic() + 60
        while not await answered(target, ClientIdentity(ca=str(fresh.cert))):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert not await answered(target, identity)
        for _ in range(3):  # heartbeats on the connection of before
            assert await watch.read() is not grpc.aio.EOF
        watch.cancel()


async def answered(target, identity) -> bool:
    """Whether a new connection comes about."""
    async with open_channel(target, identity, LOCAL_POOL) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tls_key": ""}, "tls_key"),
        ({"tls_cert": ""}, "tls_cert"),
        ({"tls_cert": "/no/such"}, "tls_cert"),
        ({"auth_jwks_file": "/no/such", "auth_jwt_issuer": "i", "auth_jwt_audience": "a"}, "auth_jwks_file"),
        ({"auth_jwks_file": "/no/such", "auth_jwt_issuer": "i"}, "auth_jwt_audience"),
        ({"auth_token_file": "/no/such"}, "auth_token_file"),
        ({"auth_certificates": {"x": CertificateIdentity("CN=x", ("reader",))}}, "tls_client_ca"),
    ],
)
async def test_settings_that_cannot_be_are_named(settings, changes, field):
    with pytest.raises(InvalidArgument) as caught:
        await start(RegistryConfig(**settings | changes))
    assert [violation.field for violation in caught.value.violations] == [field]


def test_files_that_are_no_credentials(authority, tmp_path):
    one, other = authority.issue("one", "localhost"), authority.issue("other", "localhost")
    (tmp_path / "text").write_text("no certificate")
    text = str(tmp_path / "text")
    for cert, key in ((one.cert, other.key), (text, one.key), (one.cert, text)):
        with pytest.raises(InvalidArgument):
            server_credentials(str(cert), str(key))
    for arguments in ({"ca": text}, {"ca": "/no/such"}, {"cert": str(one.cert)}, {"key": str(one.key)}):
        with pytest.raises(InvalidArgument):
            client_credentials(**arguments)
    for identity in (ClientIdentity(token="a b"), ClientIdentity(token="x", token_file=text)):
        with pytest.raises(InvalidArgument):
            open_channel("localhost:1", identity)
    assert "secret" not in repr(ClientIdentity(token="secret"))


async def test_the_inference_service_knows_callers_by_their_certificates(authority):
    """A reader's certificate opens Generate and not AdapterControlService, which needs an operator's."""
    served = authority.issue("server", "localhost")
    known = {
        "app": CertificateIdentity(identity="CN=app", roles=("reader",), namespaces=("default",)),
        "ops": CertificateIdentity(identity="CN=ops", roles=("operator",), namespaces=("default",)),
    }
    access = AccessSettings(
        tls_cert=str(served.cert), tls_key=str(served.key), tls_client_ca=str(authority.cert), auth_certificates=known
    )
    api = await server.start("localhost:0", byte_model(), FakeEngine(), FakeAdapters(), access=access)
    try:
        for name, may_operate in (("app", False), ("ops", True)):
            files = authority.issue(name)
            identity = ClientIdentity(ca=str(authority.cert), cert=str(files.cert), key=str(files.key))
            async with Client(f"localhost:{api.port}", identity=identity) as client:
                events = [event async for event in client.generate("Hi", adapter="pirate", timeout=20)]
                assert events[-1].HasField("finished")
                load = client.control.LoadAdapter(control_pb2.LoadAdapterRequest(reference="pirate"), timeout=20)
                if may_operate:
                    await client.call(load)
                else:
                    with pytest.raises(PermissionDenied):
                        await client.call(load)
        async with Client(f"localhost:{api.port}", identity=ClientIdentity(ca=str(authority.cert))) as nobody:
            with pytest.raises(LoraplexError):
                await nobody.call(nobody.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=5))
    finally:
        await api.stop(0.0)


async def test_a_clients_certificate_is_followed_under_an_open_stream(serve, settings, authority, tmp_path):
    """The server's authority and the client's are both replaced; calls go on, and the watch on its old connection."""
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    known = {"replica": CertificateIdentity(identity=REPLICA, roles=("replica",))}
    settings |= {"tls_client_ca": str(trusted), "auth_certificates": known, "connection_age_seconds": 0.2}
    target = await serve(**settings)
    own = authority.issue("mine", REPLICA)
    identity = ClientIdentity(ca=str(trusted), cert=str(own.cert), key=str(own.key))
    async with open_channel(target, identity, LOCAL_POOL) as channel:
        stub = AdapterRegistryServiceStub(channel)
        watch = stub.WatchAdapters(pb.WatchAdaptersRequest(parent="namespaces/-"))
        await watch.read()
        fresh = Authority(tmp_path, "next")
        for path, other in (
            (own, fresh.issue("own", REPLICA)),
            (Files(settings["tls_cert"], settings["tls_key"]), fresh.issue("fresh", "localhost")),
        ):
            os.replace(other.cert, path.cert)  # noqa: PTH105
            os.replace(other.key, path.key)  # noqa: PTH105
        trusted.write_bytes(fresh.cert.read_bytes())
        deadline = time.monotonic() + 60
        while not await answered(target, ClientIdentity(ca=str(trusted), cert=str(own.cert), key=str(own.key))):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        at = time.monotonic()
        while time.monotonic() < at + 1.5:  # calls need new connections, which the old files do not open
            await stub.ListBaseModels(pb.ListBaseModelsRequest(), timeout=20, wait_for_ready=True)
            await asyncio.sleep(0.1)
        assert await watch.read() is not grpc.aio.EOF
        watch.cancel()
