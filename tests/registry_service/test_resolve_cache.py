"""ResolveAdapter answers from memory, and no answer is older than what its caller has a right to."""

import asyncio
import dataclasses
import random
import uuid

import pytest
from sqlalchemy import text

from registry_service import adapter_cache, change_log, service
from registry_service.server import start
from shared.errors import AdapterNotFound, RegistryUnavailable
from tests.registry_service.watching import add_adapters, count_queries


async def settled(running, registry):
    """The log's reader has seen all that was written."""
    await registry.resolve("settled", min_revision=await registry.revision())


@pytest.fixture
def config(config):
    """The log is looked at when something is written here, and hardly ever besides."""
    return dataclasses.replace(config, poll_seconds=3600.0)


@pytest.fixture(autouse=True)
def _nothing_is_outdated_by_time(monkeypatch):
    """However busy this machine is, what was read is the present and what is absent is remembered."""
    monkeypatch.setattr(change_log, "MAX_LAG_SECONDS", 3600.0)
    monkeypatch.setattr(adapter_cache, "ABSENT_SECONDS", 3600.0)


@pytest.fixture
async def filled(registry, running):
    await add_adapters(running.database, ["settled", "a", "b", "c"], together=1)
    await settled(running, registry)
    return registry


async def test_a_miss_is_one_query_and_a_hit_none(filled, running):
    with count_queries(running.database, "adapter") as statements:
        await filled.resolve("a")
    assert len(statements) == 1
    with count_queries(running.database, "adapter") as statements:
        for reference in ("a", "a@1", "a@latest", "default/a", "a@sha256:" + "0" * 64):
            await filled.resolve(reference)
    assert statements == []


async def test_what_does_not_exist_is_remembered_too(filled, running):
    for reference in ("nobody", "a@7", "a@prod"):
        await filled.refused(AdapterNotFound, "ResolveAdapter", reference=reference)
    with count_queries(running.database, "adapter") as statements:
        for reference in ("nobody", "nobody@3", "a@7", "a@prod"):
            await filled.refused(AdapterNotFound, "ResolveAdapter", reference=reference)
    assert statements == []
    await add_adapters(running.database, ["nobody"])
    await settled(running, filled)
    assert (await filled.resolve("nobody")).version.name.endswith("/nobody/versions/1")


async def test_one_query_answers_many_who_miss_at_once(filled, running):
    with count_queries(running.database, "adapter") as statements:
        await asyncio.gather(*(filled.resolve("b") for _ in range(40)))
    assert len(statements) <= 2


async def test_a_caller_reads_what_it_wrote(filled, folders):
    """Without min_revision, at the registry that it wrote to; every change counts for the next call."""
    for seed in range(8):
        answer = await filled.register("own", uri=folders.write(seed=seed), aliases=["prod"])
        assert (await filled.resolve("own")).version == answer.version
        if seed:
            moved = await filled("SetAdapterAlias", name="own@prod", targets=[{"version": seed}])
            found = await filled.resolve("own@prod")
            assert found.version.name.endswith(f"/{seed}")
            assert found.registry_revision >= moved.registry_revision
    await filled("DeleteAdapter", name="own")
    await filled.refused(AdapterNotFound, "ResolveAdapter", reference="own")
    await filled("UndeleteAdapter", name="own")
    assert (await filled.resolve("own")).version == answer.version


async def test_the_cache_is_bounded(config, connect, registry, running):
    await add_adapters(running.database, [f"a{i}" for i in range(30)])
    server = await start(dataclasses.replace(config, cached_adapters=10))
    caller = connect(server.port)
    for i in range(30):
        await caller.resolve(f"a{i}")
    with count_queries(server.database, "adapter") as statements:
        for i in range(20, 30):
            await caller.resolve(f"a{i}")
    assert statements == []
    with count_queries(server.database, "adapter") as statements:
        await caller.resolve("a0")
    assert statements
    await caller.close()
    await server.stop()


async def test_a_log_that_cannot_be_followed_answers_nothing(filled, running, monkeypatch):
    """Then the database is asked; were it away, the caller must hear that."""
    await filled.resolve("a")
    monkeypatch.setattr(change_log, "MAX_LAG_SECONDS", 0.0)
    with count_queries(running.database, "adapter") as statements:
        await filled.resolve("a")
    assert statements


async def test_a_restored_database_is_noticed(filled, running, monkeypatch):
    await filled.resolve("a")

    async def restore(session):
        await session.execute(text("DELETE FROM changes"))
        await session.execute(text("UPDATE adapters SET delete_time = create_time WHERE name = 'a'"))
        epoch = {"epoch": str(uuid.uuid4())}
        await session.execute(text("UPDATE registry_state SET revision = 2, epoch = :epoch"), epoch)

    await running.database.write(restore)
    async with asyncio.timeout(60):
        while True:
            try:
                await filled.resolve("a")
                await asyncio.sleep(0.02)
            except AdapterNotFound:
                break
    monkeypatch.setattr(service, "MIN_REVISION_WAIT_SECONDS", 0.1)
    with pytest.raises(RegistryUnavailable):
        await filled.resolve("b", min_revision=5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_random_changes_at_two_registries(config, connect, registry, running, folders, seed):
    """Whoever passes the revision of a change sees that change or a later one at either registry."""
    rng = random.Random(seed)
    other = await start(dataclasses.replace(config, poll_seconds=0.05))
    callers = [registry, connect(other.port)]
    uris = [folders.write(f"v{i}", seed=i) for i in range(4)]
    latest, prod, is_deleted, revision = {}, {}, set(), 0
    for _ in range(80):
        writer, name = rng.choice(callers), rng.choice(["x", "y", "z"])
        action = rng.choice(["register", "register", "alias", "delete", "undelete", "resolve", "resolve"])
        if action == "register" and name not in is_deleted:
            answer = await writer.register(name, uri=rng.choice(uris))
            number = int(answer.version.name.rpartition("/")[2])
            latest[name], revision = max(latest.get(name, 0), number), answer.registry_revision
        elif action == "alias" and name in latest and name not in is_deleted:
            prod[name] = rng.randint(1, latest[name])
            answer = await writer("SetAdapterAlias", name=f"{name}@prod", targets=[{"version": prod[name]}])
            revision = answer.registry_revision
        elif action == "delete" and name in latest and name not in is_deleted:
            revision = (await writer("DeleteAdapter", name=name)).registry_revision
            is_deleted.add(name)
        elif action == "undelete" and name in is_deleted:
            revision = (await writer("UndeleteAdapter", name=name)).registry_revision
            is_deleted.discard(name)
        for alias, meaning in (("latest", latest.get(name)), ("prod", prod.get(name))):
            expected = None if name in is_deleted else meaning
            assert await _version(rng.choice(callers), f"{name}@{alias}", revision) == expected
    await callers[1].close()
    await other.stop()


async def _version(caller, reference, revision):
    try:
        return int((await caller.resolve(reference, min_revision=revision)).version.name.rpartition("/")[2])
    except AdapterNotFound:
        return None
