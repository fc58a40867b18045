import asyncio

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import bindparam, select, text, update

from registry_service import migrations
from registry_service.config import RegistryConfig
from registry_service.database import Database
from registry_service.models import AliasTarget, RegistryState
from registry_service.server import start
from shared.errors import RegistryUnavailable


@pytest.fixture
async def database(database_url):
    if database_url.startswith("sqlite"):
        migrations.upgrade(database_url)
    database = Database(database_url)
    yield database
    await database.close()


async def add_one(session):
    """Reads and writes in two statements, which loses updates where transactions are not what they should be."""
    (state,) = await session.scalars(select(RegistryState).with_for_update())
    await asyncio.sleep(0)
    await session.execute(update(RegistryState).values(revision=state.revision + 1))


async def test_concurrent_writers_lose_nothing(database):
    await asyncio.gather(*(database.write(add_one) for _ in range(40)))
    assert await database.read(lambda session: session.scalar(select(RegistryState.revision))) == 40


async def test_readers_do_not_wait_for_a_writer(database):
    async def slow(session):
        await add_one(session)
        return await asyncio.wait_for(database.read(lambda other: other.scalar(select(RegistryState.revision))), 60)

    assert await database.write(slow) == 0


async def test_a_failed_transaction_leaves_nothing(database):
    async def fail(session):
        await add_one(session)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await database.write(fail)
    assert await database.read(lambda session: session.scalar(select(RegistryState.revision))) == 0


async def test_constraints_are_kept(database):
    async def dangle(session):
        session.add(AliasTarget(adapter_uid="x", alias="y", version=1, weight=1.0))
        await session.flush()

    with pytest.raises(sqlalchemy.exc.IntegrityError):
        await database.write(dangle)


async def test_mistakes_are_not_called_unavailable(database):
    with pytest.raises(sqlalchemy.exc.DBAPIError):
        await database.read(lambda session: session.execute(text("SELECT nothing FROM nowhere")))


async def test_a_select_alone_sees_what_is_committed(database):
    revision = select(RegistryState.revision).where(RegistryState.id == bindparam("which"))
    writing, written = asyncio.Event(), asyncio.Event()

    async def slow(session):
        await add_one(session)
        writing.set()
        await written.wait()

    changing = asyncio.ensure_future(database.write(slow))
    await writing.wait()
    assert (await database.rows(revision, {"which": 1}))[0].revision == 0
    written.set()
    await changing
    assert (await database.rows(revision, {"which": 1}))[0].revision == 1
    assert await database.rows(revision, {"which": 2}) == []
    with pytest.raises(sqlalchemy.exc.DBAPIError):
        await database.rows(text("SELECT nothing FROM nowhere"), {})


async def test_a_select_alone_outlives_its_connections(postgres, migrated_postgres):
    """They are not tried before they are used: that would cost as much as the SELECT."""
    database = Database(migrated_postgres)
    query = select(RegistryState.id)
    name = psycopg.conninfo.conninfo_to_dict(migrated_postgres)["dbname"]
    with psycopg.connect(postgres.format("postgres"), autocommit=True) as connection:
        for _ in range(3):
            found = await asyncio.gather(*(database.rows(query, {}) for _ in range(6)))
            assert [rows[0].id for rows in found] == [1] * 6
            connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    await database.close()


async def test_reads_cannot_write_on_postgres(migrated_postgres):
    database = Database(migrated_postgres)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="read-only"):
        await database.read(add_one)
    await database.close()


async def test_a_server_that_takes_no_writes_is_unavailable(migrated_postgres):
    """`test_registry_kills` has a real standby."""
    database = Database(migrated_postgres)

    async def write(session):
        await session.execute(text("SET TRANSACTION READ ONLY"))
        await add_one(session)

    with pytest.raises(RegistryUnavailable):
        await database.write(write)
    await database.write(add_one)
    await database.close()


async def test_postgres_goes_away_and_comes_back(postgres, make_postgres, connect):
    url = make_postgres()
    migrations.upgrade(url)
    server = await start(RegistryConfig(listen="127.0.0.1:0", database=url))
    registry = connect(server.port)
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]

    def admin(statement):
        with psycopg.connect(postgres.format("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    await registry("ListBaseModels")
    admin(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    admin(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    error = await registry.refused(RegistryUnavailable, "ListBaseModels")
    assert error.retry_after
    assert "postgres" not in error.message
    admin(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    await registry("ListBaseModels")
    admin(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    await registry("ListBaseModels")
    await registry.close()
    await server.stop()


async def test_a_sqlite_file_that_goes_away(tmp_path, connect):
    folder = tmp_path / "data"
    folder.mkdir()
    server = await start(RegistryConfig(listen="127.0.0.1:0", database=f"sqlite:///{folder}/r.db"))
    registry = connect(server.port)
    await registry("ListBaseModels")
    await server.log.close()  # else it opens connections while they are closed, and nobody closes those
    await server.database.close()
    folder.rename(tmp_path / "moved")
    await registry.refused(RegistryUnavailable, "ListBaseModels")
    (tmp_path / "moved").rename(folder)
    await registry("ListBaseModels")
    await registry.close()
    await server.stop()
