"""What was deleted goes for good, when its time has come; counters stay, and the database itself keeps the rules."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from registry_service import purging
from registry_service.purging import Purged, Purger
from registry_service.server import start
from shared.errors import AdapterNotFound, InvalidArgument
from tests.registry_service.watching import Watch

NONE = Purged(0, 0, 0)


@pytest.fixture
async def two_versions(registry, folders):
    """Adapter `a` with versions 1 and 2, `prod` on 1."""
    await registry.register(uri=folders.write("v1", seed=1), aliases=["prod"], request_id="7e57" + "0" * 28)
    await registry.register(uri=folders.write("v2", seed=2))


@pytest.fixture
def purger(running):
    return Purger(running.database, timedelta(days=30))


async def execute(running, statement):
    return await running.database.write(lambda session: session.execute(text(statement)))


async def age(running, table, seconds=1):
    """What is deleted was to be purged some time ago, and the log has forgotten it."""
    past = (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S.%f")
    zone = "" if running.database.engine.dialect.name == "sqlite" else "+00"
    await execute(running, f"UPDATE {table} SET purge_time = '{past}{zone}' WHERE delete_time IS NOT NULL")


async def forget_changes(running):
    await execute(running, "DELETE FROM changes")
    await execute(running, "UPDATE registry_state SET compacted_revision = revision")


async def test_nothing_goes_before_its_time(registry, purger, two_versions):
    await registry("DeleteAdapterVersion", name="a@2")
    await registry("DeleteAdapter", name="a")
    assert await purger.purge() == NONE
    await registry("UndeleteAdapter", name="a")
    assert (await registry("GetAdapterVersion", name="a@2")).state == 3


async def test_a_version_goes(registry, running, purger, two_versions, caplog):
    await registry("DeleteAdapterVersion", name="a@2")
    await age(running, "adapter_versions")
    caplog.clear()
    with caplog.at_level("INFO", "loraplex.audit"):
        assert await purger.purge() == Purged(0, 1, 0)
        assert await purger.purge() == NONE
    (line,) = [record for record in caplog.records if record.name == "loraplex.audit"]
    assert (line.subject, line.rpc, line.resource, line.outcome) == ("purge", "Purge", "default/a@2", "OK")
    await registry.refused(AdapterNotFound, "GetAdapterVersion", name="a@2")
    assert (await registry.resolve("a")).version.name[-1] == "1"


async def test_an_adapter_goes_and_its_numbers_do_not_come_back(registry, running, purger, folders, two_versions):
    uid = (await registry("GetAdapter", name="a")).uid
    await registry("DeleteAdapter", name="a")
    await age(running, "adapters")
    assert await purger.purge() == NONE  # a watch that resumes must still hear of its end
    await forget_changes(running)
    assert await purger.purge() == Purged(1, 0, 0)
    await registry.refused(AdapterNotFound, "GetAdapter", name="a")
    await registry.refused(AdapterNotFound, "UndeleteAdapter", name="a")
    await registry.refused(AdapterNotFound, "ResolveAdapter", reference="a")
    again = await registry.register(uri=folders.write("v1", seed=1))
    assert (again.version.name[-1], again.adapter.latest_version) == ("3", 3)
    assert again.adapter.uid != uid
    assert not again.adapter.aliases
    assert (await registry.resolve("a", min_revision=again.registry_revision)).version == again.version
    await registry("DeleteAdapter", name="a")
    await age(running, "adapters")
    await forget_changes(running)
    assert await purger.purge() == Purged(1, 0, 0)
    assert (await registry.register(uri="file://main/v1")).version.name[-1] == "4"


async def test_what_an_older_registry_deleted_gets_its_time(registry, running, purger, two_versions):
    await registry("DeleteAdapter", name="a")
    await execute(running, "UPDATE adapters SET purge_time = NULL")
    assert await purger.purge() == NONE
    adapter = await registry("GetAdapter", name="a")
    assert adapter.purge_time.seconds - adapter.delete_time.seconds == 30 * 86400


async def test_several_registries_purge_at_once(registry, running, purger, folders):
    for index in range(12):
        await registry.register(f"a{index}", folders.write("v1", seed=1))
        await registry("DeleteAdapter", name=f"a{index}")
    await age(running, "adapters")
    await forget_changes(running)
    found = await asyncio.gather(*(Purger(running.database, timedelta(days=1)).purge() for _ in range(4)))
    assert sum(purged.adapters for purged in found) == 12


async def test_replicas_go_after_their_lease(registry, running, purger):
    await registry("ReportReplicaState", replica="r", base_model="tiny", full=True)
    old = "'2020-01-01 00:00:00.000000'"
    await execute(running, f"UPDATE replicas SET lease_expire_time = {old}")
    assert await purger.purge() == Purged(0, 0, 1)


async def test_a_watch_resumes_past_a_purge(registry, running, purger, two_versions):
    watch = await Watch(registry.stub).complete()
    await registry("DeleteAdapter", name="a")
    await age(running, "adapters")
    await watch.until(2)
    await forget_changes(running)
    await purger.purge()
    resumed = Watch(registry.stub, resume_token=watch.token)
    assert not (await resumed.next()).changes
    watch.cancel()
    resumed.cancel()


FORBIDDEN = (
    "UPDATE adapter_versions SET digest = 'x'",
    "UPDATE adapter_versions SET number = 9",
    "UPDATE adapter_versions SET manifest = '[1]'",
    "UPDATE adapter_versions SET base_model_fingerprint = ''",
    "UPDATE adapter_versions SET creator = 'me'",
    "UPDATE adapter_versions SET state = 'DELETED' WHERE number = 1",
    "UPDATE adapter_versions SET state = 'READY' WHERE number = 2",
    "UPDATE adapter_versions SET state = 'NOSUCH'",
    "DELETE FROM adapter_versions WHERE number = 2",
    "DELETE FROM adapters",
    "UPDATE adapters SET next_version = 1",
    "UPDATE adapters SET base_model = 'other'",
    "UPDATE adapters SET name = 'b'",
    "UPDATE adapters SET uid = 'x'",
    "UPDATE adapters SET residency = 'ALWAYS'",
    "UPDATE alias_targets SET weight = 0",
    "UPDATE alias_targets SET version = 7",
    "DELETE FROM aliases; DELETE FROM adapters",
    "INSERT INTO alias_targets SELECT adapter_uid, alias, 2, 1 FROM alias_targets",
    "INSERT INTO residents (replica, digest, level, pinned, reason) VALUES ('nosuch', 'x', 'GPU', true, '')",
)


async def test_the_database_keeps_the_rules_whoever_writes(registry, running, two_versions):
    await registry("DeleteAdapterVersion", name="a@2")
    before = await registry("GetAdapter", name="a")

    async def is_refused(statement):
        async def work(session):
            for part in statement.split("; "):
                await session.execute(text(part))

        try:
            await running.database.write(work)
        except IntegrityError:
            return True
        return False

    assert not [statement for statement in FORBIDDEN if not await is_refused(statement)]
    assert await registry("GetAdapter", name="a") == before


async def test_states_and_sources_of_versions_may_change(registry, running, two_versions):
    await execute(running, "UPDATE adapter_versions SET state = 'DEPRECATED'")
    await execute(running, "UPDATE adapter_versions SET pinned_sources = '[]'")
    assert (await registry("GetAdapterVersion", name="a@1")).state == 2


async def test_an_adapter_of_a_purged_name_cannot_begin_at_1(registry, running, purger, two_versions):
    """What an older registry that knows no tombstones would do is refused, not wrong."""
    await registry("DeleteAdapter", name="a")
    await age(running, "adapters")
    await forget_changes(running)
    assert (await purger.purge()).adapters == 1
    with pytest.raises(IntegrityError):
        await execute(
            running,
            "INSERT INTO adapters (uid, namespace, name, base_model, next_version, default_alias, residency, labels, "
            "annotations, description, generation, create_time, update_time) VALUES ('u', 'default', 'a', 'tiny', 1, "
            "'latest', 'ON_DEMAND', '{}', '{}', '', 1, '2026-01-01', '2026-01-01')",
        )


async def repeat(ask):
    """Until it raises."""
    while True:
        await ask()
        await asyncio.sleep(0.05)


async def test_the_server_purges(config, registry, running, two_versions, connect, monkeypatch):
    monkeypatch.setattr(purging, "PURGE_SECONDS", 0.05)
    await registry("DeleteAdapterVersion", name="a@2")
    await age(running, "adapter_versions")
    other = await start(config)
    caller = connect(other.port)
    with pytest.raises(AdapterNotFound):
        await asyncio.wait_for(repeat(lambda: caller("GetAdapterVersion", name="a@2")), 60)
    await caller.close()
    await other.stop()
    await registry.refused(InvalidArgument, "DeleteAdapterVersion", name="a")
