"""`update`, `alias`, `promote`, `rollback`, `delete-version` and `replicas` against a real registry."""

import asyncio
import json

import pytest

from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2


def told(ran):
    assert (ran.status, ran.err) == (0, ""), ran
    return ran.out.strip()


def shown(cli, name):
    return json.loads(told(cli("adapter", "show", name, "--json")))["adapter"]


def aliases(cli, name):
    return {a["name"].rpartition("/")[2]: [t["version"] for t in a["targets"]] for a in shown(cli, name)["aliases"]}


def test_update(cli, register):
    register("changing", "one", "--label", "a=1", "--label", "b=2")
    assert told(cli("adapter", "update", "changing", "--label", "c=3", "--remove-label", "a")) == "updated: changing"
    told(cli("adapter", "update", "changing", "--description", "new", "--residency", "preload", "--annotation", "n=x"))
    adapter = shown(cli, "changing")
    assert (adapter["labels"], adapter["annotations"]) == ({"b": "2", "c": "3"}, {"n": "x"})
    assert (adapter["description"], adapter["residency"]) == ("new", "RESIDENCY_PRELOAD")
    ran = cli("adapter", "update", "changing", "--description", "", "--remove-annotation", "n", "--json")
    assert (json.loads(ran.out)["description"], json.loads(ran.out)["annotations"]) == ("", {})
    assert cli("adapter", "update", "changing").status == 2
    ran = cli("adapter", "update", "changing", "--default-alias", "nosuch")
    assert (ran.status, ran.err.split(":")[0]) == (1, "INVALID_ARGUMENT")


def test_aliases_by_weight(cli, register):
    register("split", "one")
    register("split", "two")
    assert told(cli("adapter", "alias", "split@prod", "1:0.9", "2:0.1")) == "split@prod → version 1:0.9+2:0.1"
    assert "prod→1:0.9+2:0.1" in told(cli("adapter", "list"))
    assert told(cli("adapter", "alias", "split@prod", "2")) == "split@prod → version 2"
    assert told(cli("adapter", "alias", "split@prod", "--delete")) == "deleted: split@prod"
    assert aliases(cli, "split") == {}
    for wrong in (
        ["split@prod"],
        ["split@prod", "1", "--delete"],
        ["split", "1"],
        ["split@prod", "1:x"],
        ["split@p", "0"],
    ):
        assert cli("adapter", "alias", *wrong).status == 2


def test_promote_and_rollback(cli, register):
    register("ship", "one", "--alias", "prod")
    register("ship", "two", "--alias", "canary")
    assert told(cli("adapter", "promote", "ship@canary", "--alias", "prod")) == "ship@prod → version 2"
    assert told(cli("adapter", "rollback", "ship")) == "ship@prod → version 1"
    assert told(cli("adapter", "rollback", "ship")) == "ship@prod → version 2"
    assert told(cli("adapter", "rollback", "ship", "--to", "2")) == "ship@prod → version 2"
    assert json.loads(told(cli("adapter", "promote", "ship@1", "--json")))["aliases"][1]["targets"][0]["version"] == 1
    told(cli("adapter", "alias", "ship@canary", "1:1", "2:1"))
    assert "several versions" in cli("adapter", "promote", "ship@canary").err
    assert "no alias nosuch" in cli("adapter", "rollback", "ship", "--alias", "nosuch").err


def test_rollback_is_to_what_the_alias_meant(cli, register):
    for content in ("one", "two", "three"):
        register("back", content)
    told(cli("adapter", "alias", "back@prod", "1"))
    ran = cli("adapter", "rollback", "back")
    assert (ran.status, "was never changed" in ran.err) == (1, True)
    told(cli("adapter", "alias", "back@prod", "3"))
    assert told(cli("adapter", "rollback", "back")) == "back@prod → version 1"  # 2 never was prod
    told(cli("adapter", "alias", "back@prod", "2:9", "3:1"))
    assert told(cli("adapter", "rollback", "back")) == "back@prod → version 1"
    assert told(cli("adapter", "rollback", "back")) == "back@prod → version 2:9+3:1"
    told(cli("adapter", "alias", "back@prod", "1"))
    told(cli("adapter", "delete-version", "back@3"))
    ran = cli("adapter", "rollback", "back")
    assert (ran.status, ran.err.startswith("FAILED_PRECONDITION"), "deleted now (3): say --to" in ran.err) == (
        1, True, True,
    ), ran  # fmt: skip
    assert aliases(cli, "back") == {"prod": [1]}


def test_delete_version(cli, register):
    register("old", "one", "--alias", "prod")
    register("old", "two")
    assert cli("adapter", "delete-version", "old@1").err.startswith("VERSION_IN_USE")
    assert told(cli("adapter", "delete-version", "old@2")) == "deleted: namespaces/default/adapters/old/versions/2"
    assert cli("adapter", "delete-version", "old@prod").status == 2
    assert "old@2" not in told(cli("adapter", "versions", "old"))
    assert "old@2" in told(cli("adapter", "versions", "old", "--deleted", "--filter", "state = DELETED"))


def test_lists_filter_and_order(cli, register):
    for name in ("f1", "f2"):
        register(name, "one", "--label", "set=f")
    lines = told(cli("adapter", "list", "--filter", "labels.set = f", "--order-by", "name desc")).splitlines()
    assert lines[0].split() == [
        "ADAPTER", "LATEST", "VERSIONS", "ALIASES", "BASE", "MODEL", "RANK", "SIZE", "READY", "DESCRIPTION",
    ]  # fmt: skip
    assert [line.split()[:6] for line in lines[1:]] == [
        ["f2", "1", "1", "-", "tiny", "2"],
        ["f1", "1", "1", "-", "tiny", "2"],
    ]
    assert "at 1: there is no field" in cli("adapter", "list", "--filter", "nosuch = f").err


@pytest.fixture
def report(servers):
    def report(replica, digest):
        async def call():
            async with Client(registry=servers.registry) as client:
                state = {"digest": digest, "level": registry_pb2.ResidentState.LEVEL_GPU, "pinned": True}
                failed = {"digest": "sha256:" + "1" * 64, "level": 4, "reason": "FETCHING"}
                request = registry_pb2.ReportReplicaStateRequest(
                    replica=replica, base_model="tiny", full=True, resident=[state, failed]
                )
                await client.call(client.registry.ReportReplicaState(request))

        asyncio.run(call())

    return report


def test_replicas(cli, register, report):
    register("served", "one")
    version = json.loads(told(cli("adapter", "versions", "served", "--json")))[0]
    report("gpu-1:50052", version["digest"])
    header, line = told(cli("replicas")).splitlines()
    assert header.split()[:2] == ["REPLICA", "BASE"]
    assert "NOT READY" in header  # what is still on its way has not failed
    assert line.split()[:8] == ["gpu-1:50052", "tiny", "0", "1", "0", "1", "1", "FETCHING"]
    assert json.loads(told(cli("replicas", "--base-model", "tiny", "--json")))[0]["name"] == "gpu-1:50052"
    assert "1/1" in told(cli("adapter", "list", "--filter", "name = served"))
    assert told(cli("replicas", "--base-model", "other")).splitlines()[1:] == []
