import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from registry_service import migrations
from registry_service.config import RegistryConfig
from registry_service.database import driver_url
from registry_service.migrations import SchemaOutdated
from registry_service.models import Table
from registry_service.server import start
from shared.errors import RegistryUnavailable


def inspect(url, look):
    engine = sqlalchemy.create_engine(driver_url(url, is_async=False))
    with engine.connect() as connection:
        found = look(connection)
    engine.dispose()
    return found


def differences(connection):
    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
    return compare_metadata(context, Table.metadata)


def tables(connection):
    return set(sqlalchemy.inspect(connection).get_table_names()) - {"alembic_version"}


def test_the_migrations_make_the_models(empty_database_url):
    migrations.upgrade(empty_database_url)
    assert inspect(empty_database_url, differences) == []
    migrations.check(empty_database_url)
    migrations.upgrade(empty_database_url)
    assert inspect(empty_database_url, tables) == set(Table.metadata.tables)
    migrations.downgrade(empty_database_url)
    assert inspect(empty_database_url, tables) == set()
    migrations.upgrade(empty_database_url)
    assert inspect(empty_database_url, differences) == []


def test_the_state_is_one_row(empty_database_url):
    migrations.upgrade(empty_database_url)
    rows = inspect(empty_database_url, lambda c: c.execute(sqlalchemy.text("SELECT * FROM registry_state")).all())
    assert [row.revision for row in rows] == [0]
    assert len(rows[0].epoch) == 36


async def test_postgres_is_not_migrated_at_start(make_postgres):
    config = RegistryConfig(listen="127.0.0.1:0", database=make_postgres())
    with pytest.raises(SchemaOutdated, match="loraplex registry migrate"):
        await start(config)
    migrations.upgrade(config.database)
    await (await start(config)).stop()


async def test_no_database_at_start(tmp_path):
    config = RegistryConfig(listen="127.0.0.1:0", database=f"postgresql://postgres@/none?host={tmp_path}")
    with pytest.raises(RegistryUnavailable):
        await start(config)
