"""Leases, what replicas report, and what adapters say of their replicas."""

import asyncio
import json
from dataclasses import replace

import pytest

from loraplex.registry.v1 import registry_pb2
from registry_service import replica_requests
from registry_service.server import start
from shared.errors import BaseModelUnknown, InvalidArgument

DISK, HOST, GPU, FAILED = 1, 2, 3, 4
LEASE, SHORT_LEASE = 600.0, 2.0


@pytest.fixture
def config(config, request):
    return replace(config, replica_lease_seconds=getattr(request, "param", LEASE))


@pytest.fixture
async def version(registry, folders):
    """Version 1 of adapter `a`."""
    return (await registry.register(uri=folders.write())).version


async def report(registry, replica="r1", *resident, full=True, base_model="tiny", revision=1 << 40, **fields):
    states = [{"digest": digest, "level": level, "reason": reason} for digest, level, reason in resident]
    return await registry(
        "ReportReplicaState", replica=replica, base_model=base_model, observed_revision=revision, full=full,
        resident=states, **fields,
    )  # fmt: skip


async def serving(registry, name="a"):
    return (await registry("GetAdapter", name=name)).serving


def other(digit):
    return "sha256:" + digit * 64


async def held(registry, replica="r1"):
    replicas = {replica.name: replica for replica in (await registry("ListReplicas")).replicas}
    return {state.digest: state.level for state in replicas[replica].resident}


async def test_a_full_report_then_what_changes(registry, version):
    revision, before = await registry.revision(), await registry.adapter("a")
    answer = await report(registry, "r1", (version.digest, HOST, ""), (other("1"), GPU, ""))
    assert (answer.lease.seconds, answer.needs_full) == (LEASE, False)
    await report(registry, "r1", (version.digest, GPU, ""), full=False)
    assert await held(registry) == {version.digest: GPU, other("1"): GPU}
    await report(registry, "r1", (other("2"), FAILED, "FETCHING"), full=False, removed=[other("1"), other("9")])
    assert await held(registry) == {version.digest: GPU, other("2"): FAILED}
    await report(registry, "r1", (other("3"), DISK, ""))
    assert await held(registry) == {other("3"): DISK}
    assert (await registry.revision(), await registry.adapter("a")) == (revision, before)


async def test_changes_of_what_is_not_known_are_not_taken(registry, version):
    answer = await report(registry, "r1", (version.digest, HOST, ""), full=False)
    assert answer.needs_full
    assert not (await registry("ListReplicas")).replicas
    await report(registry, "r1", (version.digest, HOST, ""))
    assert not (await report(registry, "r1", full=False)).needs_full


async def test_what_an_adapter_says_of_its_replicas(registry, folders, version):
    last = (await registry("UpdateAdapter", adapter={"name": "a", "residency": 2})).registry_revision
    assert (await serving(registry)).target_replicas == 0
    await report(registry, "gpu", (version.digest, GPU, ""))
    await report(registry, "host", (version.digest, HOST, ""))
    await report(registry, "disk", (version.digest, DISK, ""))
    await report(registry, "failing", (version.digest, FAILED, "SOURCE_UNAVAILABLE"))
    await report(registry, "late", revision=last - 1)
    await report(registry, "new", revision=last)
    found = await serving(registry)
    assert (found.ready_replicas, found.target_replicas) == (2, 6)
    assert {each.replica: each.reason for each in found.not_ready} == {
        "disk": "ON_DISK", "failing": "SOURCE_UNAVAILABLE", "late": "NOT_OBSERVED", "new": "PENDING",
    }  # fmt: skip
    assert [(each.version, each.ready_replicas) for each in found.versions] == [(1, 2)]
    (listed,) = (await registry("ListAdapters")).adapters
    assert listed.serving == found
    second = (await registry.register(uri=folders.write("b", seed=1), aliases=["prod"])).version
    assert (await serving(registry)).ready_replicas == 0  # it is of another version now
    await registry("SetAdapterAlias", name="a@prod", targets=[{"version": 1}, {"version": 2}])
    await registry("UpdateAdapter", adapter={"name": "a", "default_alias": "prod"})
    await report(registry, "gpu", (version.digest, GPU, ""), (second.digest, GPU, ""))
    found = await serving(registry)
    assert found.ready_replicas == 1  # of both targets
    assert [(each.version, each.ready_replicas) for each in found.versions] == [(1, 2), (2, 1)]
    await registry("UpdateAdapter", adapter={"name": "a", "residency": 1})
    await report(registry, "new")  # knows of it
    reasons = {each.replica: each.reason for each in (await serving(registry)).not_ready}
    assert (reasons["new"], reasons["late"]) == ("ON_DEMAND", "NOT_OBSERVED")


async def test_a_replica_in_conflict_says_so_of_every_adapter(registry, folders, version):
    """It reports what it holds and its own base model as failed, and has no word about what is loaded on demand."""
    await registry.register(adapter_id="b", uri=folders.write("b", seed=1))
    for state in ((other("1"), FAILED, "BASE_MODEL_CONFLICT"), (version.digest, FAILED, "BASE_MODEL_CONFLICT")):
        await report(registry, "r1", state)
        await report(registry, "good", (other("1"), FAILED, "SOURCE_UNAVAILABLE"))
        for name in ("a", "b"):
            by_replica = {each.replica: each for each in (await serving(registry, name)).not_ready}
            assert by_replica["r1"].reason == "BASE_MODEL_CONFLICT"
            assert "start it with the registered weights" in by_replica["r1"].message
            assert by_replica["good"].reason == "ON_DEMAND"
    await report(registry, "r1", (version.digest, GPU, ""))
    assert (await serving(registry)).ready_replicas == 1


async def test_replicas_of_another_base_model_do_not_count(registry, version, tiny):
    await registry("RegisterBaseModel", id="other", config_json=json.dumps({**tiny, "vocab_size": 65}))
    await report(registry, "r1", (version.digest, GPU, ""), base_model="baseModels/other")
    assert (await serving(registry)).target_replicas == 0
    assert [r.name for r in (await registry("ListReplicas", base_model="other")).replicas] == ["r1"]
    assert not (await registry("ListReplicas", base_model="tiny")).replicas
    assert (await report(registry, "r1", full=False)).needs_full  # it changed its base model


@pytest.mark.parametrize("config", [SHORT_LEASE], indirect=True)
async def test_a_replica_that_is_silent_is_gone_after_its_lease(registry, version):
    alive = (version.digest, GPU, "")
    await report(registry, "dead", alive)
    for _ in range(4):
        await report(registry, "alive", alive)  # in full: where the machine is busy, its lease may be over as well
        await asyncio.sleep(SHORT_LEASE / 3)
    await report(registry, "alive", alive)
    assert [replica.name for replica in (await registry("ListReplicas")).replicas] == ["alive"]
    await report(registry, "alive", alive)
    found = await serving(registry)
    assert (found.ready_replicas, found.target_replicas) == (1, 1)


async def test_leases_outlive_the_registry(registry, config, running, connect, version):
    await report(registry, "r1", (version.digest, GPU, ""))
    again = await start(config)  # another process would see the same
    caller = connect(again.port)
    assert (await serving(caller)).ready_replicas == 1
    assert not (await report(caller, "r1", full=False)).needs_full
    await caller.close()
    await again.stop()


async def test_reports_at_once(registry, version):
    replicas = [f"r{index:02}" for index in range(20)]
    await asyncio.gather(*(report(registry, name, (version.digest, GPU, "")) for name in replicas for _ in range(2)))
    found, token = [], ""
    while True:
        page = await registry("ListReplicas", page_size=7, page_token=token)
        found += [replica.name for replica in page.replicas]
        if not (token := page.next_page_token):
            break
    assert found == replicas
    assert (await serving(registry)).ready_replicas == 20


async def test_reports_that_are_refused(registry, version):
    good = {"replica": "r", "base_model": "tiny", "full": True}
    state = {"digest": version.digest, "level": GPU}
    for fields, field in [
        ({"replica": ""}, "replica"),
        ({"replica": "a b"}, "replica"),
        ({"replica": "x" * 129}, "replica"),
        ({"base_model": ""}, "base_model"),
        ({"observed_revision": -1}, "observed_revision"),
        ({"resident": [{**state, "digest": "x"}]}, "resident[0].digest"),
        ({"resident": [state, {**state, "level": 0}]}, "resident[1].digest"),
        ({"resident": [{**state, "level": 9}]}, "resident[0].level"),
        ({"resident": [{**state, "reason": "\0"}]}, "resident[0].reason"),
        ({"removed": [other("1")]}, "removed"),
        ({"full": False, "removed": ["x"]}, "removed[0]"),
        ({"full": False, "removed": [version.digest], "resident": [state]}, "removed"),
    ]:
        error = await registry.refused(InvalidArgument, "ReportReplicaState", **{**good, **fields})
        assert error.violations[0].field == field
    await registry.refused(BaseModelUnknown, "ReportReplicaState", **{**good, "base_model": "nosuch"})
    assert not (await registry("ListReplicas")).replicas


def test_a_report_has_a_limit():
    states = [{"digest": f"sha256:{index:064x}", "level": GPU} for index in range(replica_requests.MAX_RESIDENTS + 1)]
    request = registry_pb2.ReportReplicaStateRequest(replica="r", base_model="tiny", full=True, resident=states)
    with pytest.raises(InvalidArgument) as caught:
        replica_requests.report(request)
    assert caught.value.violations[0].field == "resident"
