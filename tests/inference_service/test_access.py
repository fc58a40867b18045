"""Who may call which RPC of a real API server: every RPC, caller and namespace; one tenant beside another."""

import contextlib

import grpc
import pytest

from inference_service import server
from inference_service.model_header import MODEL_HEADER, OLD_MODEL_HEADER
from inference_service.types import PreparedAdapter, StagedAdapter
from loraplex.inference.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from shared.auth.settings import AccessSettings
from shared.errors import AdapterNotFound
from shared.status import from_rpc_error
from tests.inference_service.serving_fakes import DIGEST, FakeAdapters, FakeEngine, byte_model, saying
from tests.shared.auth.matrix import bearer, every, expected, methods, outcome
from tests.shared.auth.token_files import write_callers

INFERENCE, CONTROL = server.SERVICE_NAMES
RULES = methods(INFERENCE) | methods(CONTROL)
THEIRS = "sha256:" + "cd" * 32


class TwoTenants(FakeAdapters):
    """`a` of team-a and team-b are different adapters; `same` is the same content in both."""

    def __init__(self) -> None:
        super().__init__()
        self.digests = {"team-a/a": DIGEST, "team-b/a": THEIRS}
        self.staged = [
            StagedAdapter(f"namespaces/{ns}/adapters/a/versions/1", digest, "HOST", 8, 5000)
            for ns, digest in (("team-a", DIGEST), ("team-b", THEIRS))
        ]

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        self.prepared.append((reference, choice_key))
        digest = await self.resolve(reference)
        return PreparedAdapter(f"namespaces/{reference.replace('/', '/adapters/')}/versions/1", digest, 8, 5000)

    async def resolve(self, reference: str) -> str:
        if reference not in self.digests:
            name = f"namespaces/{reference.replace('/', '/adapters/')}"
            raise AdapterNotFound(f"there is no adapter {name}", metadata={"adapter": name})
        return self.digests[reference]


class Stubs:
    """The stubs of both services."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stubs = (
            inference_pb2_grpc.InferenceServiceStub(channel),
            control_pb2_grpc.AdapterControlServiceStub(channel),
        )

    def __getattr__(self, rpc: str):
        return next(getattr(stub, rpc) for stub in self._stubs if hasattr(stub, rpc))


@contextlib.asynccontextmanager
async def serving(engine, adapters, access):
    api = await server.start("127.0.0.1:0", byte_model(), engine, adapters, access=access)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
            yield Stubs(channel)
    finally:
        await api.stop(0.0)


@pytest.fixture
def access(tmp_path):
    return AccessSettings(auth_token_file=str(write_callers(tmp_path / "tokens.toml")))


def requests(namespace, adapter="a"):
    """A request of every RPC about an adapter."""
    reference = f"{namespace}/{adapter}"
    return {
        "Generate": inference_pb2.GenerateRequest(adapter=reference, text="hi", stop={"max_tokens": 1}),
        "GetModelInfo": inference_pb2.GetModelInfoRequest(),
        "Tokenize": inference_pb2.TokenizeRequest(adapter=reference, text="hi"),
        "Detokenize": inference_pb2.DetokenizeRequest(adapter=reference, token_ids=[1]),
        "LoadAdapter": control_pb2.LoadAdapterRequest(reference=reference),
        "UnloadAdapter": control_pb2.UnloadAdapterRequest(adapter=reference),
        "ListLoadedAdapters": control_pb2.ListLoadedAdaptersRequest(),
        "GetReplicaStatus": control_pb2.GetReplicaStatusRequest(),
    }


async def refusal(rpc, request, caller):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await outcome_of(rpc(request, metadata=bearer(caller), timeout=20))
    return from_rpc_error(caught.value)


async def outcome_of(call):
    return await call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else await call


async def test_every_rpc_caller_and_namespace(access):
    assert set(requests("x")) == set(RULES)
    wrong = []
    async with serving(FakeEngine(), TwoTenants(), access) as stubs:
        for rpc, caller, namespace in every(RULES, ["team-a", "team-b"]):
            found = await outcome(getattr(stubs, rpc), requests(namespace)[rpc], bearer(caller))
            if found != (wanted := expected(RULES[rpc], caller, namespace)):
                wrong.append((rpc, caller, namespace, found, wanted))
        for rpc, request in requests("team-a").items():
            assert await outcome(getattr(stubs, rpc), request) == "UNAUTHENTICATED", rpc
    assert not wrong


async def test_another_tenants_adapter_is_not_looked_for_and_looks_missing(access):
    adapters = TwoTenants()
    async with serving(FakeEngine(), adapters, access) as stubs:
        for rpc in ("Generate", "Tokenize", "Detokenize", "LoadAdapter", "UnloadAdapter"):
            missing = await refusal(getattr(stubs, rpc), requests("team-a", "z")[rpc], "admin-a")
            adapters.prepared.clear()
            there = await refusal(getattr(stubs, rpc), requests("team-b", "a")[rpc], "admin-a")
            assert not adapters.prepared
            assert (there.reason, there.metadata.keys()) == (missing.reason, missing.metadata.keys())
            assert there.message == missing.message.replace("team-a/adapters/z", "team-b/adapters/a")


async def test_a_part_of_a_blend_is_authorized_like_any_adapter(access):
    parts = [{"reference": "a", "weight": 0.5}, {"reference": "team-b/a", "weight": 0.5}]
    adapters = TwoTenants()
    async with serving(FakeEngine(), adapters, access) as stubs:
        request = inference_pb2.GenerateRequest(blend=parts, text="hi")
        refused = await refusal(stubs.Generate, request, "admin-a")
        assert (refused.reason, refused.metadata["field"]) == ("ADAPTER_NOT_FOUND", "blend[1]")
        assert refused.message == "blend[1]: there is no adapter namespaces/team-b/adapters/a"
    assert not adapters.prepared


async def test_the_tenant_is_the_namespace_of_the_token(access):
    engine = FakeEngine()
    async with serving(engine, TwoTenants(), access) as stubs:
        headers = grpc.aio.Metadata(*bearer("reader-a"), ("x-tenant", "team-b"))
        async for _ in stubs.Generate(requests("team-a")["Generate"], metadata=headers):
            pass
    assert [spec.tenant for spec in engine.specs] == ["team-a"]


async def test_a_tenant_sees_and_unloads_only_what_is_its_own(access):
    engine, adapters = FakeEngine(), TwoTenants()
    adapters.resolved = {adapter.digest: adapter.version for adapter in adapters.staged}
    async with serving(engine, adapters, access) as stubs:

        async def listed(caller):
            answer = await stubs.ListLoadedAdapters(requests("-")["ListLoadedAdapters"], metadata=bearer(caller))
            return {adapter.digest for adapter in answer.adapters}

        assert await listed("operator-a") == {DIGEST}
        assert await listed("admin-all") == {DIGEST, THEIRS}
        unknown = control_pb2.UnloadAdapterRequest(adapter="sha256:" + "ee" * 32)
        missing = await refusal(stubs.UnloadAdapter, unknown, "operator-a")
        others = control_pb2.UnloadAdapterRequest(adapter=THEIRS)
        there = await refusal(stubs.UnloadAdapter, others, "operator-a")
        assert there.message == missing.message.replace("ee" * 32, "cd" * 32)
        assert there.metadata == {"adapter": THEIRS}
        assert not engine.calls
        own = control_pb2.UnloadAdapterRequest(adapter=DIGEST)
        await stubs.UnloadAdapter(own, metadata=bearer("operator-a"))
        assert engine.calls == [("unload", DIGEST, False)]


async def test_of_content_that_others_share_a_tenant_hears_its_own_names(access):
    adapters = TwoTenants()
    names = [f"namespaces/{namespace}/adapters/same/versions/1" for namespace in ("team-a", "team-b")]
    names.append("namespaces/team-a/adapters/again/versions/2")

    async def of_all(digests):
        return dict.fromkeys(digests, names)

    adapters.names = of_all
    async with serving(FakeEngine(), adapters, access) as stubs:
        answer = await stubs.ListLoadedAdapters(requests("-")["ListLoadedAdapters"], metadata=bearer("operator-a"))
    told = [name for adapter in answer.adapters for name in (adapter.adapter_version, *adapter.other_versions)]
    assert {names[0], names[2]} <= set(told)
    assert not [name for name in told if "team-b" in name]


async def test_content_that_others_share_is_not_unloaded_for_them(access):
    engine, adapters = FakeEngine(), TwoTenants()

    async def names(digests):
        return {digest: [f"namespaces/{ns}/adapters/a/versions/1" for ns in ("team-a", "team-b")] for digest in digests}

    adapters.names = names
    async with serving(engine, adapters, access) as stubs:
        request = control_pb2.UnloadAdapterRequest(adapter="a", force=True)
        answer = await stubs.UnloadAdapter(request, metadata=bearer("operator-a"))
        assert answer == control_pb2.UnloadAdapterResponse()
        assert not engine.calls
        request.adapter = "team-a/a"
        answer = await stubs.UnloadAdapter(request, metadata=bearer("admin-all"))
        assert list(answer.shared_with) == ["namespaces/team-b/adapters/a/versions/1"]
        assert engine.calls == [("unload", DIGEST, True)]


async def test_another_tenants_adapter_cannot_be_named_in_a_header_either(access):
    adapters = TwoTenants()
    async with serving(FakeEngine(), adapters, access) as stubs:
        for rpc, header, request in (
            ("Generate", MODEL_HEADER, inference_pb2.GenerateRequest(text="hi")),
            ("Generate", OLD_MODEL_HEADER, inference_pb2.GenerateRequest(text="hi")),
            ("Tokenize", MODEL_HEADER, inference_pb2.TokenizeRequest(text="hi")),
        ):
            headers = grpc.aio.Metadata(*bearer("admin-a"), (header, "team-b/a"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await outcome_of(getattr(stubs, rpc)(request, metadata=headers, timeout=20))
            assert from_rpc_error(caught.value).reason == "ADAPTER_NOT_FOUND"
    assert not adapters.prepared


async def test_equal_request_ids_of_two_tenants_are_two_requests(access):
    """Neither sees, ends nor hinders the other's."""
    engine = FakeEngine(saying("hello"))
    engine.gate.clear()
    async with serving(engine, TwoTenants(), access) as stubs:
        calls = []
        for namespace, caller in (("team-a", "reader-a"), ("team-b", "admin-all")):
            request = requests(namespace)["Generate"]
            request.request_id = "guessed"
            calls.append(stubs.Generate(request, metadata=bearer(caller)))
        assert [(await call.read()).started.request_id for call in calls] == ["guessed"] * 2
        calls[1].cancel()
        engine.gate.set()
        while (event := await calls[0].read()) is not grpc.aio.EOF:
            last = event.WhichOneof("event")
        assert last == "finished"
    assert len({spec.request_id for spec in engine.specs}) == 2
