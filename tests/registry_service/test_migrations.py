import threading
import time

import psycopg
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from registry_service import migrations
from registry_service.config import RegistryConfig
from registry_service.database import driver_url
from registry_service.migrations.revisions import SchemaOutdated
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
    def is_made(_object, name, *_):
        return name != "ix_adapters_labels" or connection.dialect.name == "postgresql"

    options = {"compare_type": True, "compare_server_default": True, "include_object": is_made}
    return compare_metadata(MigrationContext.configure(connection, opts=options), Table.metadata)


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


WRITTEN_BY_0002 = """
INSERT INTO base_models (id, architecture, fingerprint, config_json, num_modules, create_time)
VALUES ('tiny', 'LlamaForCausalLM', 'sha256:0', '{}', 14, '2026-01-01 00:00:00');
INSERT INTO adapters (uid, namespace, name, base_model, next_version, default_alias, residency, labels, annotations,
                      description, generation, create_time, update_time, delete_time)
VALUES ('u', 'default', 'a', 'tiny', 3, 'latest', 'ON_DEMAND', '{"k": "v"}', '{}', '', 4, '2026-01-01 00:00:00',
        '2026-01-01 00:00:00', NULL),
       ('d', 'default', 'deleted', 'tiny', 2, 'latest', 'ON_DEMAND', '{}', '{}', '', 2, '2026-01-01 00:00:00',
        '2026-01-01 00:00:00', '2026-01-02 00:00:00');
INSERT INTO adapter_versions (uid, adapter_uid, number, digest, source, pinned_sources, manifest, lora_config,
                              warnings, base_model_fingerprint, size_bytes, num_tensors, state, creator, create_time)
VALUES ('v1', 'u', 1, 'sha256:1', '{}', '[]', '[]', '{}', '[]', 'sha256:0', 1, 1, 'READY', 'c', '2026-01-01 00:00:00'),
       ('v2', 'u', 2, 'sha256:2', '{}', '[]', '[]', '{}', '[]', 'sha256:0', 1, 1, 'READY', 'c', '2026-01-01 00:00:00');
INSERT INTO aliases (adapter_uid, name, update_time) VALUES ('u', 'prod', '2026-01-01 00:00:00');
INSERT INTO alias_targets (adapter_uid, alias, version, weight) VALUES ('u', 'prod', 1, 1.0);
INSERT INTO changes (revision, adapter_uid, kind, create_time) VALUES (1, 'u', 'UPSERT', '2026-01-01 00:00:00');
UPDATE registry_state SET revision = 1
"""
# What a registry of 0002 goes on doing while others are at 0003 already.
STILL_DONE_BY_0002 = """
UPDATE adapters SET next_version = 4, generation = 5 WHERE uid = 'u';
INSERT INTO adapter_versions (uid, adapter_uid, number, digest, source, pinned_sources, manifest, lora_config,
                              warnings, base_model_fingerprint, size_bytes, num_tensors, state, creator, create_time)
VALUES ('v3', 'u', 3, 'sha256:3', '{}', '[]', '[]', '{}', '[]', 'sha256:0', 1, 1, 'READY', 'c', '2026-01-01 00:00:00');
UPDATE adapter_versions SET pinned_sources = '[1]' WHERE uid = 'v1';
UPDATE aliases SET update_time = '2026-01-03 00:00:00' WHERE adapter_uid = 'u' AND name = 'prod';
DELETE FROM alias_targets WHERE alias = 'prod';
INSERT INTO alias_targets (adapter_uid, alias, version, weight) VALUES ('u', 'prod', 3, 1.0);
UPDATE adapters SET delete_time = '2026-01-03 00:00:00' WHERE uid = 'u';
UPDATE adapters SET delete_time = NULL, purge_time = NULL WHERE uid = 'u';
DELETE FROM changes WHERE revision <= 1
"""


DELETED_ON_SQLITE = "PRAGMA foreign_keys = ON; DELETE FROM alias_targets; DELETE FROM aliases"


def execute(url, statements):
    engine = sqlalchemy.create_engine(driver_url(url, is_async=False))
    try:
        with engine.begin() as connection:
            for statement in statements.split(";"):
                connection.exec_driver_sql(statement)
    finally:
        engine.dispose()


def contents(connection):
    """As far as 0002 knows it."""
    columns = dict.fromkeys(("adapters", "adapter_versions", "aliases", "alias_targets", "base_models"), "*")
    columns["changes"] = "revision, adapter_uid, kind, create_time"
    return {
        name: sorted(connection.exec_driver_sql(f"SELECT {listed} FROM {name}").all(), key=str)
        for name, listed in columns.items()
    }


def test_up_and_down_with_data(empty_database_url):
    url = empty_database_url
    migrations.upgrade(url, "0002")
    execute(url, WRITTEN_BY_0002)
    before = inspect(url, contents)
    migrations.upgrade(url)
    assert inspect(url, contents) == before
    migrations.downgrade(url, "0002")
    assert inspect(url, contents) == before
    execute(url, "DELETE FROM alias_targets; DELETE FROM adapter_versions WHERE uid = 'v2'")  # no trigger is left
    migrations.upgrade(url)
    with pytest.raises(sqlalchemy.exc.DBAPIError):
        execute(url, "DELETE FROM adapter_versions WHERE uid = 'v1'")


def test_an_older_registry_goes_on_meanwhile(empty_database_url):
    url = empty_database_url
    migrations.upgrade(url, "0002")
    execute(url, WRITTEN_BY_0002)
    migrations.upgrade(url)
    execute(url, STILL_DONE_BY_0002)
    found = inspect(url, contents)
    assert len(found["adapter_versions"]) == 3
    assert found["changes"] == []
    previous = "SELECT adapter_uid, alias, version, weight FROM previous_alias_targets"
    assert inspect(url, lambda c: c.exec_driver_sql(previous).all()) == [("u", "prod", 1, 1.0)]
    execute(url, "DELETE FROM alias_targets; DELETE FROM aliases" if "postgres" in url else DELETED_ON_SQLITE)
    assert inspect(url, lambda c: c.exec_driver_sql(previous).all()) == []


def test_indexes_are_built_while_an_older_registry_writes(make_postgres):
    url = make_postgres()
    migrations.upgrade(url, "0003")
    execute(url, WRITTEN_BY_0002)
    with psycopg.connect(url) as older, psycopg.connect(url, autocommit=True) as other:
        older.execute("UPDATE adapters SET description = 'one' WHERE uid = 'u'")
        migration = threading.Thread(target=migrations.upgrade, args=(url,))
        migration.start()
        building = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND wait_event_type = 'Lock'"
        wait_until(lambda: other.execute(building).fetchone())  # for the transaction that has begun
        other.execute("SET lock_timeout = '20s'")
        other.execute("UPDATE adapters SET description = 'two' WHERE uid = 'd'")  # one that comes later need not wait
        assert migration.is_alive()
        older.commit()
        migration.join(60)
    migrations.check(url)
    assert inspect(url, differences) == []


def test_an_index_whose_building_was_cut_off_is_built_again(make_postgres):
    url = make_postgres()
    migrations.upgrade(url, "0003")
    execute(url, "CREATE INDEX ix_adapters_labels ON adapters (uid)")
    execute(url, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_adapters_labels'::regclass")
    upgrades = [threading.Thread(target=migrations.upgrade, args=(url,)) for _ in range(2)]
    for each in upgrades:
        each.start()
    for each in upgrades:
        each.join(60)
    migrations.check(url)
    found = "SELECT indexdef FROM pg_indexes WHERE indexname = 'ix_adapters_labels'"
    assert "USING gin (labels)" in inspect(url, lambda connection: connection.exec_driver_sql(found).scalar())


def test_statistics_know_the_new_indexes(tmp_path):
    url = f"sqlite:///{tmp_path}/registry.db"
    migrations.upgrade(url, "0003")
    execute(url, WRITTEN_BY_0002 + "; ANALYZE")
    migrations.upgrade(url)
    known = inspect(url, lambda connection: connection.exec_driver_sql("SELECT idx FROM sqlite_stat1").scalars().all())
    assert "ix_adapters_namespace_update_time" in known


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
