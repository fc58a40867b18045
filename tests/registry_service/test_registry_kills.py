"""A registry that is killed, and a database that drops its connections, while adapters are registered."""

import asyncio
import json
import signal
import sys
import uuid

import psycopg
import pytest

from registry_service import migrations
from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.errors import LoraplexError, RegistryUnavailable, Unavailable
from tests.registry_service.conftest import TINY, Caller
from tests.registry_service.embedded_postgres import embedded_postgres

CONTENTS = 8
ONE = [{"version": 1}]


class Process:
    """A registry as a process of its own."""

    def __init__(self, url, root):
        self.command = [
            sys.executable, "-m", "registry_service", "--listen", "127.0.0.1:0", "--database", url,
            "--file-root", f"main={root}",
        ]  # fmt: skip

    async def start(self):
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*self.command, stderr=pipe, limit=1 << 20)
        async for line in self.process.stderr:
            record = json.loads(line)
            if record["message"] == "the registry is ready":
                break
        self.reading = asyncio.ensure_future(self.process.stderr.read())
        return Caller(record["port"])

    async def kill(self):
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self.reading


async def until(is_so):
    for _ in range(20_000):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize(
    ("total", "kills"), [(60, 1), pytest.param(1000, 3, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_kill_9_loses_nothing_that_was_acknowledged(database_url, folders, total, kills):
    for content in range(CONTENTS):
        folders.write(f"c{content}", seed=content)
    registry = Process(database_url, folders.root)
    caller = await registry.start()
    await caller("RegisterBaseModel", id="tiny", config_json=json.dumps(TINY))
    left = [(f"a{index}", f"file://main/c{index % CONTENTS}", str(uuid.uuid4())) for index in range(total)]
    acknowledged, kill_at = {}, [total * (kill + 1) // (kills + 2) for kill in range(kills)]

    async def work():
        while left:
            name, source, request_id = entry = left.pop()
            try:
                answer = await caller.register(name, source, request_id=request_id, aliases=["prod"])
            except LoraplexError:
                left.append(entry)
                return
            acknowledged[name] = (answer.version.uid, answer.registry_revision)

    while left:
        workers = asyncio.gather(*(work() for _ in range(8)))
        if kill_at:
            goal = kill_at.pop(0)
            await until(lambda goal=goal: len(acknowledged) >= goal)
            await registry.kill()
            await workers
            await caller.close()
            caller = await registry.start()
        else:
            await workers
    assert len(acknowledged) == total
    for name, (uid, _) in acknowledged.items():
        adapter = await caller("GetAdapter", name=name)
        assert (adapter.latest_version, adapter.num_versions) == (1, 1)
        assert (await caller.resolve(f"{name}@prod")).version.uid == uid
    revisions = [revision for _, revision in acknowledged.values()]
    assert len(set(revisions)) == total
    await caller.close()
    await registry.kill()


async def test_connections_that_are_killed_leave_nothing_half_done(postgres, make_postgres, folders):
    url = make_postgres()
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    await asyncio.to_thread(migrations.upgrade, url)
    for content in range(CONTENTS):
        folders.write(f"c{content}", seed=content)
    roots = {"main": str(folders.root)}
    server = await start(RegistryConfig(listen="127.0.0.1:0", database=url, file_roots=roots))
    caller = Caller(server.port)
    await caller("RegisterBaseModel", id="tiny", config_json=json.dumps(TINY))
    refused = []

    async def work(index):
        """Registers and moves an alias until it is acknowledged."""
        request_id = str(uuid.uuid4())
        while True:
            try:
                answer = await caller.register(f"a{index}", f"file://main/c{index % CONTENTS}", request_id=request_id)
                await caller("SetAdapterAlias", name=f"a{index}@prod", targets=[{"version": 1}])
            except Unavailable as error:
                refused.append(error)
                await asyncio.sleep(0.01)
            else:
                return answer.version.uid

    async def murder():
        with psycopg.connect(postgres.format("postgres"), autocommit=True) as connection:
            for _ in range(25):
                connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
                await asyncio.sleep(0.03)

    found = await asyncio.gather(murder(), *(work(index) for index in range(60)))
    assert all(type(error) is RegistryUnavailable and error.retry_after for error in refused)
    for index, uid in enumerate(found[1:]):
        adapter = await caller("GetAdapter", name=f"a{index}")
        assert (adapter.latest_version, adapter.num_versions) == (1, 1)
        assert (await caller.resolve(f"a{index}@prod")).version.uid == uid
    with psycopg.connect(url) as connection:
        (state,) = connection.execute("SELECT revision FROM registry_state").fetchall()
        changes = connection.execute("SELECT revision FROM changes ORDER BY revision").fetchall()
        (targets,) = connection.execute("SELECT count(*) FROM alias_targets").fetchall()
    assert targets == (60,)
    assert changes[-1] == state  # every change has one entry, of a revision of its own
    assert len(changes) == state[0] - 1  # the base model has no entry
    await caller.close()
    await server.stop()


@pytest.mark.slow
async def test_a_primary_that_becomes_a_standby(folders):
    """Its readers are answered; writers are told to try again, and succeed once it is promoted."""
    with embedded_postgres("fsync=off") as postgres:
        url = postgres.create_database("registry")
        await asyncio.to_thread(migrations.upgrade, url)
        roots = {"main": str(folders.root)}
        server = await start(RegistryConfig(listen="127.0.0.1:0", database=url, file_roots=roots))
        caller = Caller(server.port)
        await caller("RegisterBaseModel", id="tiny", config_json=json.dumps(TINY))
        uri = folders.write("a")
        await asyncio.gather(*(caller.register(f"a{index}", uri) for index in range(4)))  # several connections
        await asyncio.to_thread(postgres.restart_as_standby)
        for index in range(4):
            assert (await caller.resolve(f"a{index}@1")).version.name
            await caller("GetAdapter", name=f"a{index}")
            error = await caller.refused(RegistryUnavailable, "SetAdapterAlias", name="a0@prod", targets=ONE)
            assert error.retry_after
        with psycopg.connect(url, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)
        await caller("SetAdapterAlias", name="a0@prod", targets=ONE)
        assert (await caller.resolve("a0@prod")).version.name
        await caller.close()
        await server.stop()
