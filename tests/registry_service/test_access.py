"""Who may call which RPC of a real registry: every RPC, caller and namespace, and what a refusal tells."""

import contextlib
import dataclasses
import json
import logging
import uuid

import grpc
import pytest

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from registry_service.server import SERVICE, start
from shared.status import from_rpc_error
from tests.shared.auth.matrix import bearer, every, expected, methods, outcome
from tests.shared.auth.token_files import CALLERS, entry, token, write_callers

RULES = methods(SERVICE)
CONFIG = json.dumps(
    {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
)  # that of the fixture `folders`
OTHER_ETAG = '"another"'


def requests(namespace, adapter="a"):
    """A request of every RPC about an adapter, of which none changes it."""
    name = f"namespaces/{namespace}/adapters/{adapter}"
    alias, version = f"{name}/aliases/prod", f"{name}/versions/1"
    return {
        "RegisterAdapter": pb.RegisterAdapterRequest(
            parent=f"namespaces/{namespace}", adapter_id=adapter, source={"uri": "file://main/none"}, validate_only=True
        ),
        "ResolveAdapter": pb.ResolveAdapterRequest(reference=f"{namespace}/{adapter}"),
        "WatchAdapters": pb.WatchAdaptersRequest(parent=f"namespaces/{namespace}"),
        "GetAdapter": pb.GetAdapterRequest(name=name),
        "ListAdapters": pb.ListAdaptersRequest(parent=f"namespaces/{namespace}"),
        "UpdateAdapter": pb.UpdateAdapterRequest(adapter={"name": name, "etag": OTHER_ETAG, "description": "x"}),
        "DeleteAdapter": pb.DeleteAdapterRequest(name=name, etag=OTHER_ETAG),
        "UndeleteAdapter": pb.UndeleteAdapterRequest(name=name),
        "GetAdapterVersion": pb.GetAdapterVersionRequest(name=version),
        "ListAdapterVersions": pb.ListAdapterVersionsRequest(parent=name),
        "DeleteAdapterVersion": pb.DeleteAdapterVersionRequest(name=version, etag=OTHER_ETAG),
        "SetAdapterAlias": pb.SetAdapterAliasRequest(name=alias, targets=[{"version": 1}], etag=OTHER_ETAG),
        "DeleteAdapterAlias": pb.DeleteAdapterAliasRequest(name=alias, etag=OTHER_ETAG),
        "RegisterBaseModel": pb.RegisterBaseModelRequest(id="tiny", config_json=CONFIG),
        "GetBaseModel": pb.GetBaseModelRequest(name="tiny"),
        "ListBaseModels": pb.ListBaseModelsRequest(),
        "ReportReplicaState": pb.ReportReplicaStateRequest(replica="r", base_model="tiny", full=True),
        "ListReplicas": pb.ListReplicasRequest(),
    }


@pytest.fixture
def database_url(tmp_path):
    return f"sqlite:///{tmp_path}/registry.db"


@contextlib.asynccontextmanager
async def serving(config):
    server = await start(config)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield AdapterRegistryServiceStub(channel)
    finally:
        await server.stop()


@pytest.fixture
async def stub(config, folders, tmp_path):
    """A registry where `a` is in team-a and in team-b, and callers are known by tokens."""
    config = dataclasses.replace(config, auth_token_file=str(write_callers(tmp_path / "tokens.toml")))
    async with serving(config) as stub:
        await stub.RegisterBaseModel(requests("-")["RegisterBaseModel"], metadata=bearer("replica"))
        for namespace in ("team-a", "team-b"):
            request = pb.RegisterAdapterRequest(
                parent=f"namespaces/{namespace}",
                adapter_id="a",
                base_model="tiny",
                source={"uri": folders.write()},
                aliases=["prod"],
            )
            await stub.RegisterAdapter(request, metadata=bearer("admin-all"))
        yield stub


async def test_every_rpc_caller_and_namespace(stub):
    assert set(requests("x")) == set(RULES)
    wrong = []
    for rpc, caller, namespace in every(RULES, ["team-a", "team-b"]):
        found = await outcome(getattr(stub, rpc), requests(namespace)[rpc], bearer(caller))
        if found != (wanted := expected(RULES[rpc], caller, namespace)):
            wrong.append((rpc, caller, namespace, found, wanted))
    assert not wrong


async def test_nobody_may_call_anything(stub):
    for metadata in (
        None,
        bearer("unknown"),
        grpc.aio.Metadata(("authorization", "Basic abc")),
        grpc.aio.Metadata(("authorization", "Bearer ")),
        grpc.aio.Metadata(*bearer("admin-a"), *bearer("admin-a")),
    ):
        for rpc, request in requests("team-a").items():
            assert await outcome(getattr(stub, rpc), request, metadata) == "UNAUTHENTICATED", rpc
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetAdapter(pb.GetAdapterRequest(name="a"), metadata=bearer("unknown"))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    challenge = from_rpc_error(caught.value).metadata["www_authenticate"]
    assert challenge == 'Bearer realm="loraplex", error="invalid_token"'


async def test_what_others_have_looks_like_what_nobody_has(stub):
    """The same code, reason, message and details, up to the name that was asked for."""

    async def refusal(rpc, request):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, rpc)(request, metadata=bearer("admin-a"))
        error = from_rpc_error(caught.value)
        return caught.value.code(), error.reason, error.message, error.metadata

    for rpc in ("GetAdapter", "ResolveAdapter", "DeleteAdapter", "UpdateAdapter", "ListAdapterVersions"):
        code, reason, message, metadata = await refusal(rpc, requests("team-a", "z")[rpc])
        facts = {key: value.replace("team-a", "team-b") for key, value in metadata.items()}
        expected = (code, reason, message.replace("team-a", "team-b"), facts)
        assert await refusal(rpc, requests("team-b", "z")[rpc]) == expected
        there = await refusal(rpc, requests("team-b", "a")[rpc])
        assert str(there) == str(expected).replace("adapters/z", "adapters/a")


async def test_lists_and_watches_show_what_the_caller_may_see(stub):
    async def listed(caller):
        page = await stub.ListAdapters(pb.ListAdaptersRequest(parent="namespaces/-"), metadata=bearer(caller))
        return {adapter.name.split("/")[1] for adapter in page.adapters}

    async def watched(caller):
        call = stub.WatchAdapters(pb.WatchAdaptersRequest(parent="namespaces/-"), metadata=bearer(caller))
        batch = await call.read()
        call.cancel()
        return {change.adapter.name.split("/")[1] for change in batch.changes}

    assert await listed("reader-a") == await watched("reader-a") == {"team-a"}
    assert await listed("reader-all") == await watched("replica") == {"team-a", "team-b"}


async def test_the_namespace_is_the_callers_own_unless_it_names_one(stub):
    adapter = await stub.GetAdapter(pb.GetAdapterRequest(name="a"), metadata=bearer("reader-a"))
    assert adapter.name == "namespaces/team-a/adapters/a"
    headers = grpc.aio.Metadata(*bearer("reader-a"), ("x-namespace", "team-b"), ("x-tenant", "team-b"))
    adapter = await stub.GetAdapter(pb.GetAdapterRequest(name="a"), metadata=headers)
    assert adapter.name == "namespaces/team-a/adapters/a"


async def read_all(stream):
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_a_token_is_taken_away_while_a_watch_runs(config, tmp_path):
    path = write_callers(tmp_path / "tokens.toml")
    config = dataclasses.replace(config, auth_token_file=str(path), resolve_ttl_seconds=1.0)
    async with serving(config) as stub:
        watch = stub.WatchAdapters(pb.WatchAdaptersRequest(parent="namespaces/team-a"), metadata=bearer("reader-a"))
        await watch.read()
        path.write_text(entry("new", ["reader"], ["team-a"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(watch)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await outcome(stub.ListBaseModels, pb.ListBaseModelsRequest(), bearer("new")) == "PASS"
        assert await outcome(stub.ListBaseModels, pb.ListBaseModelsRequest(), bearer("reader-a")) == "UNAUTHENTICATED"


async def test_changes_are_written_down_and_secrets_are_not(stub, folders, caplog):
    caplog.set_level(logging.DEBUG)
    name = "namespaces/team-a/adapters/a"
    headers = grpc.aio.Metadata(*bearer("writer-a"), ("x-request-id", "req-7"))
    done = await stub.DeleteAdapter(pb.DeleteAdapterRequest(name=name), metadata=headers)
    await outcome(stub.UndeleteAdapter, pb.UndeleteAdapterRequest(name=name), bearer("reader-a"))
    await outcome(stub.DeleteAdapter, pb.DeleteAdapterRequest(name="team-b/a"), bearer("writer-a"))
    await stub.GetAdapter(pb.GetAdapterRequest(name=name), metadata=bearer("reader-a"))
    await outcome(stub.GetAdapter, pb.GetAdapterRequest(name=name), bearer("unknown"))
    lines = [record for record in caplog.records if record.name == "loraplex.audit"]
    deleted, undeleted, others = lines
    assert (deleted.subject, deleted.credential, deleted.rpc) == ("writer-a", "token", "DeleteAdapter")
    assert (deleted.resource, deleted.outcome, deleted.request_id) == ("team-a/a", "OK", "req-7")
    assert deleted.revision == done.registry_revision
    assert (undeleted.subject, undeleted.outcome) == ("reader-a", "PERMISSION_DENIED")
    assert undeleted.request_id
    assert (others.resource, others.outcome) == ("team-b/a", "ADAPTER_NOT_FOUND")
    everything = "\n".join(str(vars(record)) for record in caplog.records)
    for subject in (*CALLERS, "unknown"):
        assert token(subject) not in everything


async def test_another_tenants_digest_opens_nothing(stub, folders):
    """A digest is content's name, and no key to it: neither below an adapter of one's own, nor below theirs."""
    theirs = pb.RegisterAdapterRequest(
        parent="namespaces/team-b", adapter_id="a", base_model="tiny", source={"uri": folders.write("theirs", seed=7)}
    )
    digest = (await stub.RegisterAdapter(theirs, metadata=bearer("admin-all"))).version.digest
    for reference in (f"team-a/a@{digest}", f"a@{digest}", f"team-b/a@{digest}"):
        request = pb.ResolveAdapterRequest(reference=reference)
        assert await outcome(stub.ResolveAdapter, request, bearer("admin-a")) == "ADAPTER_NOT_FOUND"
    request = pb.ResolveAdapterRequest(reference=f"team-b/a@{digest}")
    assert await outcome(stub.ResolveAdapter, request, bearer("replica")) == "PASS"


async def test_another_callers_request_id_answers_nothing(stub, folders):
    """Who guesses the id of a registration gets one of its own, not that one's answer or error."""
    request_id = str(uuid.uuid4())
    names = []
    for caller, namespace in (("writer-a", "team-a"), ("admin-all", "team-b"), ("admin-all", "team-a")):
        request = pb.RegisterAdapterRequest(
            parent=f"namespaces/{namespace}", adapter_id=f"of-{caller}", base_model="tiny", request_id=request_id,
            source={"uri": folders.write()},
        )  # fmt: skip
        done = await stub.RegisterAdapter(request, metadata=bearer(caller))
        assert done.created
        names.append(done.version.name)
    assert len(set(names)) == 3
