"""The audit log: who changed what, when and by which request, of every RPC that changes anything."""

import json
import logging
import uuid

import grpc
import pytest

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import resources_pb2
from registry_service.server import SERVICE
from shared.auth.rules import RULES
from tests.registry_service.test_access import requests, stub  # noqa: F401  # a fixture
from tests.shared.auth.matrix import bearer, outcome

READING = ("Resolve", "Watch", "Get", "List")
NO_CHANGE = {"ReportReplicaState"}  # heartbeats: they move no revision
CHANGING = [
    method.name
    for method in pb.DESCRIPTOR.services_by_name["AdapterRegistryService"].methods
    if not method.name.startswith(READING) and method.name not in NO_CHANGE
]
NAME = "namespaces/team-a/adapters/a"


@pytest.fixture
def database_url(tmp_path):
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
def lines(caplog):
    """What has been written down since it was asked last."""
    caplog.set_level(logging.INFO)

    def lines():
        found = [record for record in caplog.records if record.name == "loraplex.audit"]
        caplog.clear()
        return found

    return lines


def test_every_rpc_that_changes_anything_is_audited():
    audited = {method.rpartition("/")[2] for method, rule in RULES.items() if SERVICE in method and rule.is_change}
    assert audited == set(CHANGING)


async def test_what_is_written_of_each_change(stub, folders, lines, tiny):  # noqa: F811
    source = resources_pb2.AdapterSource(uri=folders.write("b", seed=1))
    done = {
        "RegisterBaseModel": (pb.RegisterBaseModelRequest(id="other", config_json=json.dumps(tiny)), "other", ""),
        "RegisterAdapter": (
            pb.RegisterAdapterRequest(
                parent="namespaces/team-a", adapter_id="a", source=source, aliases=["new"], request_id=str(uuid.uuid4())
            ),
            "team-a/a",
            "aliases new",
        ),
        "SetAdapterAlias": (
            pb.SetAdapterAliasRequest(name="team-a/a@new", targets=[{"version": 1, "weight": 0.9}, {"version": 2}]),
            "team-a/a@new",
            "1:0.9 2",
        ),
        "UpdateAdapter": (
            pb.UpdateAdapterRequest(adapter={"name": NAME, "residency": 3}, update_mask={"paths": ["residency"]}),
            "team-a/a",
            "fields residency",
        ),
        "DeleteAdapterAlias": (pb.DeleteAdapterAliasRequest(name="team-a/a@new"), "team-a/a@new", ""),
        "DeleteAdapterVersion": (pb.DeleteAdapterVersionRequest(name="team-a/a@2"), "team-a/a@2", ""),
        "DeleteAdapter": (pb.DeleteAdapterRequest(name="team-a/a"), "team-a/a", ""),
        "UndeleteAdapter": (pb.UndeleteAdapterRequest(name="team-a/a"), "team-a/a", ""),
    }
    assert set(done) == set(CHANGING)
    lines()
    for rpc, (request, resource, change) in done.items():
        metadata = grpc.aio.Metadata(*bearer("admin-all"), ("x-request-id", f"of-{rpc}"))
        answer = await getattr(stub, rpc)(request, metadata=metadata)
        (line,) = lines()
        assert (line.subject, line.credential, line.rpc, line.outcome) == ("admin-all", "token", rpc, "OK")
        assert (line.resource, getattr(line, "change", "")) == (resource, change)
        assert line.request_id == (getattr(request, "request_id", "") or f"of-{rpc}")
        assert line.revision == answer.registry_revision > 0


async def test_refusals_are_written_down(stub, lines):  # noqa: F811
    lines()
    asked = requests("team-a")
    asked["RegisterAdapter"].validate_only = False
    for rpc in CHANGING:
        assert await outcome(getattr(stub, rpc), asked[rpc], bearer("reader-a")) == "PERMISSION_DENIED"
        (line,) = lines()
        assert (line.subject, line.rpc, line.outcome) == ("reader-a", rpc, "PERMISSION_DENIED")
        assert line.request_id
        assert line.resource


async def test_base_models_are_written_down_when_something_of_them_is_new(stub, lines):  # noqa: F811
    request = requests("-")["RegisterBaseModel"]
    lines()
    await stub.RegisterBaseModel(request, metadata=bearer("replica"))
    assert lines() == []
    request.weights_fingerprint = "sha256:" + "1" * 64
    await stub.RegisterBaseModel(request, metadata=bearer("replica"))
    await stub.RegisterBaseModel(request, metadata=bearer("replica"))
    (line,) = lines()
    assert (line.resource, line.outcome) == ("tiny", "OK")
    request.weights_fingerprint = "sha256:" + "2" * 64
    await outcome(stub.RegisterBaseModel, request, bearer("replica"))
    (line,) = lines()
    assert line.outcome == "BASE_MODEL_CONFLICT"
