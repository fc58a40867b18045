"""WatchAdapters: snapshots, changes in order, resuming, several registries on one database, and how watches end."""

import asyncio
import dataclasses
import json
import random
import time
import uuid

import grpc
import pytest
from sqlalchemy import text

from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from registry_service.change_log import PAGE_CHANGES, LogSettings, Position
from registry_service.server import start
from registry_service.watch import ResumeToken
from shared.errors import AdapterNotFound, Draining, InvalidArgument, WatchCompacted, WatchTooSlow
from tests.registry_service.watching import Watch, add_adapters, count_queries

UPSERT, DELETE = registry_pb2.AdapterChange.TYPE_UPSERT, registry_pb2.AdapterChange.TYPE_DELETE


@pytest.fixture
def watch(registry):
    """Starts watches of the running registry."""
    started = []

    def begin(**fields):
        started.append(Watch(registry.stub, **fields))
        return started[-1]

    yield begin
    for one in started:
        one.cancel()


# ---- what is told


async def test_a_snapshot_then_every_change(registry, folders, watch):
    first = await registry.register("a", uri=folders.write("a"), aliases=["prod"])
    await registry.register("b", uri="file://main/a")
    await registry.register("gone", uri="file://main/a")
    await registry("DeleteAdapter", name="gone")
    found = await watch().complete()
    assert len(found.responses) == 1
    assert found.names == ["a", "b"]
    assert {change.type for change in found.changes} == {UPSERT}
    assert set(found.revisions) == {await registry.revision()} == {found.responses[0].registry_revision}
    assert found.changes[0].adapter == await registry.adapter("a")
    assert list(found.changes[0].versions) == [first.version]

    second = await registry.register("a", uri=folders.write("a2", seed=2))
    await found.until(3)
    assert found.changes[2].revision == second.registry_revision == found.responses[-1].registry_revision
    assert list(found.changes[2].versions) == [first.version, second.version]  # prod and latest
    moved = await registry("SetAdapterAlias", name="a@prod", targets=[{"version": 2}])
    await found.until(4)
    assert list(found.changes[3].versions) == [second.version]
    assert found.changes[3].adapter == moved.adapter
    deleted = await registry("DeleteAdapter", name="a")
    await found.until(5)
    assert (found.changes[4].type, found.changes[4].revision) == (DELETE, deleted.registry_revision)
    assert not found.changes[4].versions
    assert found.changes[4].adapter == deleted.adapter
    restored = await registry("UndeleteAdapter", name="a")
    await found.until(6)
    assert (found.changes[5].type, found.changes[5].adapter) == (UPSERT, restored.adapter)
    assert not any(response.snapshot_complete for response in found.responses[1:])


async def test_a_change_that_deleted_a_version_says_which(registry, folders, watch):
    await registry.register("a", uri=folders.write("a"))
    second = await registry.register("a", uri=folders.write("a2", seed=2))
    live = await watch(skip_snapshot=True).complete()
    token = live.token
    for number in (1, 2):
        await registry("DeleteAdapterVersion", name=f"a@{number}")
        adapter = {"name": "a", "description": str(number)}
        await registry("UpdateAdapter", adapter=adapter, update_mask={"paths": ["description"]})
        await live.until(2 * number)
    for found in (live, watch(resume_token=token)):
        await found.until(4)
        assert [change.deleted_version for change in found.changes] == [1, 0, 2, 0]
    assert list(live.changes[0].versions) == [second.version]
    assert live.changes[2].adapter.latest_version == 0
    assert not any(change.deleted_version for change in (await watch().complete()).changes)


async def test_without_a_snapshot(registry, folders, watch):
    await registry.register("a", uri=folders.write("a"))
    found = watch(skip_snapshot=True)
    response = await found.next()
    assert response.snapshot_complete
    assert not response.changes
    assert response.registry_revision == await registry.revision()
    await registry.register("b", uri="file://main/a")
    await found.until(1)
    assert found.names == ["b"]


async def test_an_empty_registry_has_a_snapshot(watch):
    response = await watch().next()
    assert response.snapshot_complete
    assert response.resume_token


async def test_only_adapters_of_the_base_model(registry, tiny, running, watch):
    await registry("RegisterBaseModel", id="other", config_json=json.dumps({**tiny, "vocab_size": 65}))
    await add_adapters(running.database, ["a", "c"])
    await add_adapters(running.database, ["b"], base_model="other")
    found = await watch(base_model="baseModels/other").complete()
    assert found.names == ["b"]
    await add_adapters(running.database, ["d"])
    await add_adapters(running.database, ["e"], base_model="other")
    await found.until(2)
    assert found.names == ["b", "e"]
    assert (await watch(parent="", base_model="tiny").complete()).names == ["a", "c", "d"]
    assert (await watch(parent="namespaces/default").complete()).names == ["a", "b", "c", "d", "e"]


async def test_requests_that_are_refused(registry, watch):
    for fields, wrong in [
        ({"parent": "default"}, {"parent"}),
        ({"base_model": "NO"}, {"base_model"}),
        ({"resume_token": "x", "base_model": "NO"}, {"base_model", "resume_token"}),
    ]:
        error = await watch(**fields).refused(InvalidArgument)
        assert {violation.field for violation in error.violations} == wrong
    for token in ("é", "bnVsbA", "W10", "WzEsMl0", "WyJhIiwtMV0", "WyJhIiwxLCJcdTAwMDAiLCJiIl0", "A" * 5000):
        error = await watch(resume_token=token).refused(InvalidArgument)
        assert error.violations[0].field == "resume_token"
    await watch(parent="namespaces/other").refused(AdapterNotFound)


async def test_a_watch_with_nothing_to_tell_says_so(config, connect):
    server = await start(dataclasses.replace(config, resolve_ttl_seconds=0.3))
    registry = connect(server.port)
    found = Watch(registry.stub)
    await found.complete()
    revision = await registry.revision()  # a base model moves the revision and changes no adapter
    while (response := await found.next()).registry_revision < revision:
        assert not response.changes
    resumed = await Watch(registry.stub, resume_token=response.resume_token).complete()
    assert not resumed.changes
    await registry.close()
    await server.stop()


# ---- batches


async def test_batches_are_bounded_and_each_can_be_resumed(registry, running, watch):
    page = PAGE_CHANGES
    names = [f"a{i:04}" for i in range(2 * page + 7)]
    await add_adapters(running.database, names)
    found = await watch().complete()
    assert [len(response.changes) for response in found.responses] == [page, page, 7]
    assert found.names == names
    for response, seen in zip(found.responses, (page, 2 * page, len(names)), strict=True):
        rest = await watch(resume_token=response.resume_token).complete()
        assert rest.names == names[seen:]
    await add_adapters(running.database, ["late"])
    rest = await watch(resume_token=found.responses[0].resume_token).until(page + 9)
    assert rest.names == [*names[page:], "late", "late"]  # in the snapshot, and as the change that it is


async def test_large_adapters_come_in_more_messages(registry, running, watch):
    names = [f"a{i:03}" for i in range(120)]
    await add_adapters(running.database, names, description="x" * 40_000)
    found = await watch().complete()
    assert len(found.responses) >= len(names) * 40_000 >> 20
    assert max(response.ByteSize() for response in found.responses) < (1 << 20) + 2000
    assert found.names == names
    seen = 0
    for response in found.responses:
        seen += len(response.changes)
        assert (await watch(resume_token=response.resume_token).complete()).names == found.names[seen:]
    before = ResumeToken(Position(running.log.position.epoch, 1)).text()  # as it was before the adapters
    missed = await watch(resume_token=before).complete()
    assert len(missed.responses) > 1
    assert len(missed.changes) == len(names)
    assert all(response.registry_revision == response.changes[-1].revision for response in missed.responses[:-1])


# ---- resuming


async def test_no_gap_and_no_repeat_over_reconnects_and_restarts(config, connect, registry, running):
    """Adapters are added all the while; the watch breaks off at random, and the registry is restarted."""
    rng = random.Random(4)
    found = Watch(registry.stub, skip_snapshot=True)
    await found.complete()
    seen, token = [], found.token
    names = [f"a{i:03}" for i in range(120)]

    async def write():
        for name in names:
            await add_adapters(running.database, [name])
            await asyncio.sleep(rng.uniform(0, 0.02))

    writing = asyncio.ensure_future(write())
    while len(seen) < len(names):
        server = await start(config)
        caller = connect(server.port)
        for _ in range(3):
            part = Watch(caller.stub, resume_token=token)
            await part.next()
            for _ in range(rng.randrange(4)):
                if len(seen) + len(part.changes) < len(names):
                    await part.next()
            seen += part.changes
            token = part.token
            part.cancel()
        await caller.close()
        await server.stop()
    await writing
    revisions = [change.revision for change in seen]
    assert revisions == sorted(set(revisions))
    assert [change.adapter.name.rpartition("/")[2] for change in seen] == names


async def test_what_cannot_be_continued(config, connect, registry, running, watch):
    await add_adapters(running.database, ["a", "b", "c", "d"], together=1)
    found = await watch().complete()
    tokens = [found.token]
    await add_adapters(running.database, ["e"])
    await found.until(5)
    tokens.append(found.token)
    await add_adapters(running.database, ["f", "g"], together=1)
    await found.until(7)
    tokens.append(found.token)

    server = await start(dataclasses.replace(config, log_keep_changes=1))  # compacts at its start
    caller = connect(server.port)
    await _eventually(lambda: _is_compacted(server.database, running.log.position.revision - 1))
    for token in tokens[:2]:
        error = await Watch(caller.stub, resume_token=token).refused(WatchCompacted)
        assert error.code == "OUT_OF_RANGE"
    assert not (await Watch(caller.stub, resume_token=tokens[2]).complete()).changes
    assert (await Watch(caller.stub).complete()).names == ["a", "b", "c", "d", "e", "f", "g"]
    # The first registry still has in memory what came after the second token.
    assert (await watch(resume_token=tokens[1]).complete()).names == ["f", "g"]
    await caller.close()
    await server.stop()


async def _is_compacted(database, revision):
    async def read(session):
        return await session.scalar(text("SELECT compacted_revision FROM registry_state"))

    return await database.read(read) >= revision


async def _eventually(is_true):
    async with asyncio.timeout(60):
        while not await is_true():  # noqa: ASYNC110  # nothing tells when
            await asyncio.sleep(0.02)


async def test_another_life_of_the_database(registry, running, watch):
    await add_adapters(running.database, ["a"])
    found = await watch().complete()

    async def restore(session):
        await session.execute(text("UPDATE registry_state SET epoch = :epoch"), {"epoch": str(uuid.uuid4())})

    await running.database.write(restore)
    await found.refused(WatchCompacted)
    await watch(resume_token=found.token).refused(WatchCompacted)
    assert (await watch().complete()).names == ["a"]
    assert (await registry("GetAdapter", name="a")).name


async def test_a_backup_without_the_last_changes(registry, running, watch):
    await add_adapters(running.database, ["a", "b"], together=1)
    found = await watch().complete()

    async def restore(session):
        await session.execute(text("DELETE FROM changes WHERE revision > 2"))
        await session.execute(text("UPDATE registry_state SET revision = 2"))

    await running.database.write(restore)
    await found.refused(WatchCompacted)
    await watch(resume_token=found.token).refused(WatchCompacted)


# ---- several registries


@pytest.fixture(params=["polling", "listening"])
async def pair(request, migrated_postgres, config, connect, tiny, caplog):
    """Callers of two registries on one Postgres."""
    if not config.database.startswith("postgresql"):
        pytest.skip("one process owns a SQLite file")
    listening = {"listen_url": migrated_postgres, "poll_seconds": 60.0} if request.param == "listening" else {}
    with caplog.at_level("INFO", "registry_service.listener"):
        servers = [await start(dataclasses.replace(config, **listening)) for _ in range(2)]
        async with asyncio.timeout(60):  # a hint before LISTEN is lost, which then costs a poll
            while listening and caplog.messages.count("listening for changes") < 2:  # noqa: ASYNC110 - it is told there
                await asyncio.sleep(0.01)
    callers = [connect(server.port) for server in servers]
    await callers[0]("RegisterBaseModel", id="tiny", config_json=json.dumps(tiny))
    yield callers
    for caller in callers:
        await caller.close()
    await asyncio.gather(*(server.stop() for server in servers))


async def test_changes_cross_registries(pair, folders):
    one, two = pair
    found = Watch(two.stub)
    await found.complete()
    uri = folders.write("a")
    for number in range(5):
        answer = await one.register(f"a{number}", uri=uri)
        await found.until(number + 1)
        assert found.revisions[-1] == answer.registry_revision
        assert (await two.resolve(f"a{number}", min_revision=answer.registry_revision)).version == answer.version
        # A token may be carried to a registry that has not read as far yet.
        assert not (await Watch(one.stub, resume_token=found.token).complete()).changes
    found.cancel()


async def test_revisions_are_commit_order(pair, folders):
    """32 writers on two registries; a watch at each sees every revision once, in order, and the same ones."""
    uris = [folders.write(f"v{seed}", seed=seed) for seed in range(32)]
    watches = [Watch(caller.stub) for caller in pair]
    for found in watches:
        await found.complete()
    answers = await asyncio.gather(
        *(pair[i % 2].register("hot" if i % 4 else f"b{i}", uri=uri) for i, uri in enumerate(uris))
    )
    revisions = sorted(answer.registry_revision for answer in answers)
    assert len(set(revisions)) == 32
    for found in watches:
        await found.until(32)
        assert found.revisions == revisions
        found.cancel()
    hot = sorted(int(a.version.name.rpartition("/")[2]) for a in answers if "/hot/" in a.version.name)
    assert hot == list(range(1, 25))


# ---- many, slow and last


async def test_a_change_reaches_fifty_watches(registry, running, folders):
    watches = [Watch(registry.stub, skip_snapshot=True) for _ in range(50)]
    await asyncio.gather(*(found.complete() for found in watches))
    uri = folders.write("a")
    delays, queries = [], []
    for number in range(5):
        waiting = [asyncio.ensure_future(found.until(number + 1)) for found in watches]
        await registry.register(f"a{number}", uri=uri)
        committed = time.monotonic()
        with count_queries(running.database) as statements:
            await asyncio.gather(*waiting)
        queries.append(len(statements))
        delays.append(max(found.arrivals[-1] for found in watches) - committed)
    print(f"a change reached 50 watches after {sorted(delays)[2] * 1e3:.1f} ms (median of 5)")
    assert all(found.names == [f"a{number}" for number in range(5)] for found in watches)
    assert sum(queries) < 50  # one reader, not one query a watch
    for found in watches:
        found.cancel()


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
async def test_a_slow_watch_is_ended_and_may_resume(registry, running, watch):
    """It reads nothing while more changes come than the registry keeps in memory and gRPC keeps in flight."""
    quick = watch(skip_snapshot=True)
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", narrow)
    slow = Watch(registry_pb2_grpc.AdapterRegistryServiceStub(channel), skip_snapshot=True)
    await slow.complete()
    await quick.complete()
    names = [f"a{i:04}" for i in range(LogSettings().recent_changes + 200)]
    for first in range(0, len(names), 100):
        await add_adapters(running.database, names[first : first + 100], description="x" * 4000)
        await quick.until(first + 100)
    error = await slow.refused(WatchTooSlow)
    assert error.code == "RESOURCE_EXHAUSTED"
    assert error.retry_after
    assert 0 < len(slow.changes) < len(names)
    rest = await watch(resume_token=slow.token).until(len(names) - len(slow.changes))
    assert slow.names + rest.names == names == quick.names
    await channel.close()


async def test_watches_end_when_the_registry_does(config, connect):
    server = await start(config)
    registry = connect(server.port)
    found = await Watch(registry.stub).complete()
    stopping = asyncio.ensure_future(server.stop(grace=3600))
    error = await found.refused(Draining)
    assert error.code == "UNAVAILABLE"
    await stopping  # it waits for no watch
    await registry.close()


async def test_a_watch_whose_caller_leaves_is_forgotten(registry, running, watch):
    for _ in range(20):
        found = await watch().complete()
        found.cancel()
    await add_adapters(running.database, ["a"])
    assert (await watch().complete()).names == ["a"]
