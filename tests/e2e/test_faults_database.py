"""The registry's Postgres refuses connections, hangs, and crashes, under load; each time it comes back."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import psutil
import psycopg
import pytest
import pytest_asyncio

from loraplex import Client
from registry_service import migrations
from tests.e2e.tiny_stack import TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, at_last, refusal
from tests.registry_service.embedded_postgres import EmbeddedPostgres, embedded_postgres

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
SECONDS = 60.0
SECONDS_DOWN = 5.0


class Served(NamedTuple):
    """A client of the running services, and the database that they use."""

    client: Client
    postgres: EmbeddedPostgres
    database: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    with embedded_postgres() as postgres:
        url = postgres.create_database("registry")
        await asyncio.to_thread(migrations.upgrade, url)
        run = tmp_path_factory.mktemp("database")
        async with world.serving(run, names=["content-0", "content-1"], database=url) as (_, client):
            yield Served(client, postgres, "registry")


def on_postgres(served: Served, *statements: str) -> None:
    with psycopg.connect(served.postgres.url.format("postgres"), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@contextmanager
def refusing(served: Served) -> Iterator[None]:
    """Connections are ended, and no new ones are taken."""
    allow = f"ALTER DATABASE {served.database} ALLOW_CONNECTIONS"
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{served.database}'"
    on_postgres(served, f"{allow} false", end)
    try:
        yield
    finally:
        on_postgres(served, f"{allow} true")


@contextmanager
def hanging(served: Served) -> Iterator[None]:
    """All its processes stand still: connections are taken and nothing answers."""
    server = psutil.Process(served.postgres.pid)
    family = [server, *server.children()]
    for process in family:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in family:
            process.send_signal(signal.SIGCONT)


@contextmanager
def crashing(served: Served) -> Iterator[None]:
    """One of its processes is killed, so it ends all others and recovers from its log."""
    server = psutil.Process(served.postgres.pid)
    backends = [process for process in server.children() if served.database in " ".join(process.cmdline())]
    os.kill(backends[0].pid, signal.SIGKILL)
    yield


OUTAGES = {"refusing": refusing, "hanging": hanging, "crashing": crashing}


@pytest.mark.parametrize("what", OUTAGES)
async def test_a_database_that_is_down_and_comes_back(world: TinyWorld, served: Served, what: str) -> None:
    client = served.client
    new = world.contents[2 + list(OUTAGES).index(what)]
    outage: AbstractContextManager[None] = OUTAGES[what](served)
    async with Traffic(world, client, RESIDENT) as traffic:
        with outage:
            down = time.monotonic()
            if what != "crashing":  # which may be over already
                error = await refusal(ask(client, 0, f"never-heard-of-{what}"))
                assert error.reason == "REGISTRY_UNAVAILABLE"
                assert error.retry_after is not None
                seconds_until_told = time.monotonic() - down
                print(f"{what}: told within {seconds_until_told:.2f} s;", end=" ")
            await asyncio.sleep(SECONDS_DOWN - (time.monotonic() - down))
            await traffic.answers(20)
        back = time.monotonic()
        await at_last(lambda: register_content(client, new, new), SECONDS)
        answer, _ = await at_last(lambda: ask(client, 0, new), SECONDS)
        assert_is_of(world, new, 0, answer)
        print(f"{what}: a new adapter answers {time.monotonic() - back:.2f} s after the database is back;", end=" ")
        await traffic.answers(8)
