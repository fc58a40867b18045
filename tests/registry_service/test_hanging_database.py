"""A database that is connected and does not answer: a Postgres that hangs, rows and files that others keep locked."""

import asyncio
import json
import logging
import sqlite3
import threading
import time
import uuid
from contextlib import closing

import psycopg
import pytest

from registry_service import command_engine, database, giving_up, listener, migrations
from registry_service.__main__ import main
from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.errors import RegistryUnavailable
from tests.registry_service.embedded_postgres import embedded_postgres


@pytest.fixture(scope="module")
def server():
    with embedded_postgres("fsync=off") as server:
        yield server


@pytest.fixture
def url(server):
    url = server.create_database("t" + uuid.uuid4().hex)
    migrations.upgrade(url)
    return url


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(database, "LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(giving_up, "CANCEL_SECONDS", 0.2)


@pytest.fixture
async def hanging_registry(url, folders, tiny, connect):
    """A registry on Postgres, and a caller of it that has registered one adapter."""
    config = RegistryConfig(listen="127.0.0.1:0", database=url, file_roots={"main": str(folders.root)}, listen_url=url)
    running = await start(config)
    caller = connect(running.port)
    await register_tiny(caller, tiny)
    folders.write("a")
    await caller.register("a")
    yield running, caller
    await caller.close()
    await running.stop()


async def register_tiny(caller, tiny):
    await caller("RegisterBaseModel", id="tiny", config_json=json.dumps(tiny))


async def until(is_so):
    async with asyncio.timeout(60):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.05)


async def answers(caller):
    try:
        await caller("ListBaseModels")
    except RegistryUnavailable:
        return False
    return True


async def test_calls_end_while_postgres_hangs(server, hurry, hanging_registry, caplog):
    running, caller = hanging_registry
    calls = {
        "GetAdapter": {"name": "a"},
        "ListAdapters": {},
        "ResolveAdapter": {"reference": "unknown"},
        "UpdateAdapter": {"adapter": {"name": "namespaces/default/adapters/a", "description": "x"}},
        "ReportReplicaState": {"replica": "r:1", "base_model": "tiny", "full": True},
    }
    for _ in range(2):
        caplog.clear()
        with server.hanging():
            for _ in range(2):  # on connections that there are, and on new ones
                async with asyncio.timeout(30):
                    errors = await asyncio.gather(
                        *(caller.refused(RegistryUnavailable, rpc, **fields) for rpc, fields in calls.items())
                    )
                assert all(error.retry_after for error in errors)
            assert not running.database.is_up
        await until(lambda: answers(caller))
        assert (await caller("UpdateAdapter", **calls["UpdateAdapter"])).adapter.description == "x"
        assert running.log.is_current()
        pools = (running.database.engine.pool, running.database.lookups.pool)

        async def is_free(pools=pools):
            return all(pool.checkedout() == 0 for pool in pools)

        await until(is_free)  # no connection is lost
        told = [record.getMessage() for record in caplog.records if record.name == database.__name__]
        assert told[0] == "the database cannot be used: no answer within 1 s"
        assert not any("sqlalche.me" in message or "\n" in message for message in caplog.messages)


async def test_a_registry_stops_while_postgres_hangs(server, url, monkeypatch):
    monkeypatch.setattr(database, "_CLOSE_SECONDS", 0.5)
    running = await start(RegistryConfig(listen="127.0.0.1:0", database=url))
    with server.hanging():
        call = asyncio.ensure_future(running.database.read(lambda session: session.connection()))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(database.LIMIT_SECONDS - 1):
            await running.stop()
        with pytest.raises((asyncio.CancelledError, RegistryUnavailable)):
            await call


async def test_a_lock_that_is_not_had_in_time(hurry, url, hanging_registry):
    """The statement that waited for it is no more, and the same request succeeds later."""
    _, caller = hanging_registry
    request = {"name": "namespaces/default/adapters/a", "description": "later"}
    with psycopg.connect(url) as other:
        other.execute("SELECT 1 FROM adapters FOR UPDATE")
        await caller.refused(RegistryUnavailable, "UpdateAdapter", adapter=request)

        async def nobody_waits():
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return other.execute(waiting).fetchone() == (0,)

        await until(nobody_waits)
    await caller("UpdateAdapter", adapter=request)
    assert (await caller.adapter("a")).description == "later"


async def test_a_commit_that_is_not_confirmed_in_time(server, hurry, hanging_registry, folders):
    """It may have come about, and has here; the same request again is answered with it."""
    _, caller = hanging_registry
    folders.write("b")
    request = {"adapter_id": "b", "uri": "file://main/b", "request_id": str(uuid.uuid4())}
    with psycopg.connect(server.url.format("postgres"), autocommit=True) as admin:

        def confirmed_by(standbys):
            admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'")
            admin.execute("SELECT pg_reload_conf()")

        confirmed_by("nobody")
        try:
            source = {"uri": request["uri"]}
            fields = {"adapter_id": "b", "source": source, "base_model": "tiny", "request_id": request["request_id"]}
            await caller.refused(RegistryUnavailable, "RegisterAdapter", **fields)
        finally:
            confirmed_by("")
    await until(lambda: answers(caller))
    found = await caller("GetAdapter", name="b")
    assert found.num_versions == 1
    again = await caller.register(**request)
    assert again.created
    assert again.adapter.uid == found.uid
    assert (await caller("GetAdapter", name="b")).num_versions == 1


async def test_a_listener_notices_that_nobody_is_there(server, url, hurry, monkeypatch, caplog):
    monkeypatch.setattr(listener, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(listener, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, listener.__name__)

    def has_told(text, times):
        async def is_so():
            return sum(text in message for message in caplog.messages) >= times

        return is_so

    listening = asyncio.ensure_future(listener.listen(url, lambda: None))
    await until(has_told("listening for changes", 1))
    with server.hanging():
        await until(has_told("so they are polled for: no answer within 0.5 s", 1))
    await until(has_told("listening for changes", 2))
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize("command", [["migrate"], ["export"], ["new-epoch"], ["serve", "--listen", "127.0.0.1:0"]])
def test_commands_say_that_nobody_answers(server, url, command, monkeypatch, capfd):
    monkeypatch.setitem(database.PATIENCE, "connect_timeout", 2)
    with server.hanging():
        assert main([*command, "--database", url]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: REGISTRY_UNAVAILABLE: the registry's database cannot be used: ")
    assert "timeout" in line


def test_a_migration_that_waits_says_for_what_and_ends_when_nobody_answers(server, url, monkeypatch, caplog):
    monkeypatch.setattr(command_engine, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(command_engine, "_ASK_SECONDS", 0.2)
    caplog.set_level(logging.INFO)
    raised = []

    def migrate():
        try:
            migrations.upgrade(url)
        except RegistryUnavailable as error:
            raised.append(error)

    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [migrations._LOCK_KEY])
        migration = threading.Thread(target=migrate)
        migration.start()
        migration.join(1.5 * command_engine.SILENT_SECONDS)
        assert migration.is_alive()  # whoever is answered waits as long as it takes
        assert caplog.messages == ["waiting for another process that migrates the database"]
        with server.hanging():
            migration.join(60)
            assert not migration.is_alive()
    (error,) = raised
    assert error.message == "the registry's database cannot be used: it has not answered for 3 seconds"
    migrations.upgrade(url)


async def test_a_sqlite_file_that_another_process_keeps_locked(tmp_path, tiny, connect, monkeypatch, caplog):
    monkeypatch.setattr(database, "_BUSY_MILLISECONDS", 300)
    running = await start(RegistryConfig(listen="127.0.0.1:0", database=f"sqlite:///{tmp_path}/r.db"))
    caller = connect(running.port)
    began = time.monotonic()
    with closing(sqlite3.connect(tmp_path / "r.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        error = await caller.refused(RegistryUnavailable, "RegisterBaseModel", id="tiny", config_json=json.dumps(tiny))
        assert error.retry_after
        assert await answers(caller)  # readers need no lock
    assert time.monotonic() >= began + 0.3
    assert "the database cannot be used: database is locked" in caplog.messages
    await register_tiny(caller, tiny)
    await caller.close()
    await running.stop()
