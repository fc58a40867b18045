"""Replicas and what they hold; counters of purged adapters; triggers that keep the rules whoever writes.

Registries of the schema before go on meanwhile: everything is added, and no trigger forbids what they do.
"""

from collections.abc import Iterator
from typing import NamedTuple

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)

IMMUTABLE = (
    "uid", "adapter_uid", "number", "digest", "source", "manifest", "lora_config", "warnings", "base_model_fingerprint",
    "size_bytes", "num_tensors", "creator", "create_time",
)  # fmt: skip


class Rule(NamedTuple):
    """`event` on `table` is refused where `broken` is true of the row OLD or NEW."""

    name: str
    event: str
    table: str
    broken: dict[str, str]  # by dialect
    message: str


def _rules() -> Iterator[Rule]:
    now = {"sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now')", "postgresql": "now()"}
    differs = {"sqlite": "OLD.{0} IS NOT NEW.{0}", "postgresql": "OLD.{0} IS DISTINCT FROM NEW.{0}"}

    def both(condition: str) -> dict[str, str]:
        return {dialect: condition.replace("{now}", now[dialect]) for dialect in now}

    def changed(columns: tuple[str, ...]) -> dict[str, str]:
        return {dialect: " OR ".join(text.format(column) for column in columns) for dialect, text in differs.items()}

    yield Rule(
        "adapter_versions_are_immutable", "UPDATE", "adapter_versions", changed(IMMUTABLE), "versions are immutable"
    )
    yield Rule(
        "deleted_versions_stay_deleted",
        "UPDATE",
        "adapter_versions",
        both("OLD.state = 'DELETED' AND NEW.state <> 'DELETED'"),
        "a deleted version stays deleted",
    )
    yield Rule(
        "versions_in_use_stay",
        "UPDATE",
        "adapter_versions",
        both(
            "OLD.state <> 'DELETED' AND NEW.state = 'DELETED' AND EXISTS (SELECT 1 FROM alias_targets AS t "
            "WHERE t.adapter_uid = OLD.adapter_uid AND t.version = OLD.number)"
        ),
        "an alias names the version",
    )
    yield Rule(
        "versions_go_when_purged",
        "DELETE",
        "adapter_versions",
        both(
            "(OLD.purge_time IS NULL OR OLD.purge_time > {now}) AND NOT EXISTS (SELECT 1 FROM adapters AS a "
            "WHERE a.uid = OLD.adapter_uid AND a.delete_time IS NOT NULL AND a.purge_time <= {now})"
        ),
        "versions are kept until purge_time",
    )
    yield Rule(
        "adapters_go_when_purged",
        "DELETE",
        "adapters",
        both("OLD.delete_time IS NULL OR OLD.purge_time IS NULL OR OLD.purge_time > {now}"),
        "adapters are kept until purge_time",
    )
    yield Rule(
        "adapters_keep_their_identity",
        "UPDATE",
        "adapters",
        changed(("uid", "namespace", "name", "base_model", "create_time")),
        "uid, name and base model of an adapter are immutable",
    )
    yield Rule(
        "counters_only_grow",
        "UPDATE",
        "adapters",
        both("NEW.next_version < OLD.next_version"),
        "next_version only grows",
    )
    yield Rule(
        "counters_outlive_purges",
        "INSERT",
        "adapters",
        both(
            "NEW.next_version < (SELECT t.next_version FROM tombstones AS t "
            "WHERE t.namespace = NEW.namespace AND t.name = NEW.name)"
        ),
        "next_version goes on after a purge",
    )
    yield Rule(
        "targets_are_live",
        "INSERT",
        "alias_targets",
        both(
            "EXISTS (SELECT 1 FROM adapter_versions AS v WHERE v.adapter_uid = NEW.adapter_uid "
            "AND v.number = NEW.version AND v.state = 'DELETED')"
        ),
        "an alias names live versions",
    )


_REMEMBER = (
    "INSERT INTO tombstones (namespace, name, next_version) VALUES (OLD.namespace, OLD.name, OLD.next_version) "
    "ON CONFLICT (namespace, name) DO UPDATE SET next_version = excluded.next_version"
)


def upgrade() -> None:
    op.create_table(
        "tombstones",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("next_version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "name", name=op.f("pk_tombstones")),
    )
    op.create_table(
        "replicas",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("base_model", sa.String(length=63), nullable=False),
        sa.Column("observed_revision", sa.BigInteger(), nullable=False),
        sa.Column("lease_expire_time", TIME, nullable=False),
        sa.ForeignKeyConstraint(["base_model"], ["base_models.id"], name=op.f("fk_replicas_base_model")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_replicas")),
    )
    op.create_index("ix_replicas_base_model", "replicas", ["base_model"])
    op.create_table(
        "residents",
        sa.Column("replica", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("level", sa.String(length=16), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(length=255), nullable=False),
        sa.CheckConstraint("level IN ('DISK', 'HOST', 'GPU', 'FAILED')", name=op.f("ck_residents_level")),
        sa.ForeignKeyConstraint(["replica"], ["replicas.name"], name=op.f("fk_residents_replica"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("replica", "digest", name=op.f("pk_residents")),
    )
    op.create_index("ix_residents_digest", "residents", ["digest"])
    op.create_index("ix_changes_adapter_uid", "changes", ["adapter_uid"])
    op.create_index("ix_adapters_delete_time", "adapters", ["delete_time"])
    op.create_index("ix_adapter_versions_purge_time", "adapter_versions", ["purge_time"])
    for rule in _rules():
        _refuse(rule)
    _remember_counters()


def downgrade() -> None:
    for rule in _rules():
        _drop(rule.name, rule.table)
    _drop("purges_leave_a_tombstone", "adapters")
    op.drop_index("ix_adapter_versions_purge_time", table_name="adapter_versions")
    op.drop_index("ix_adapters_delete_time", table_name="adapters")
    op.drop_index("ix_changes_adapter_uid", table_name="changes")
    op.drop_index("ix_residents_digest", table_name="residents")
    op.drop_table("residents")
    op.drop_index("ix_replicas_base_model", table_name="replicas")
    op.drop_table("replicas")
    op.drop_table("tombstones")


def _refuse(rule: Rule) -> None:
    dialect = op.get_bind().dialect.name
    head = f"CREATE TRIGGER {rule.name} BEFORE {rule.event} ON {rule.table} FOR EACH ROW"
    if dialect == "sqlite":
        op.execute(f"{head} WHEN {rule.broken[dialect]} BEGIN SELECT RAISE(ABORT, '{rule.message}'); END")
        return
    op.execute(
        f"CREATE FUNCTION {rule.name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF {rule.broken[dialect]} THEN RAISE EXCEPTION '{rule.message}' USING ERRCODE = 'check_violation'; END IF; "
        f"RETURN {'OLD' if rule.event == 'DELETE' else 'NEW'}; END $$"
    )
    op.execute(f"{head} EXECUTE FUNCTION {rule.name}()")


def _remember_counters() -> None:
    head = "CREATE TRIGGER purges_leave_a_tombstone AFTER DELETE ON adapters FOR EACH ROW"
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"{head} BEGIN {_REMEMBER}; END")
        return
    op.execute(
        "CREATE FUNCTION purges_leave_a_tombstone() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {_REMEMBER}; RETURN OLD; END $$"
    )
    op.execute(f"{head} EXECUTE FUNCTION purges_leave_a_tombstone()")


def _drop(name: str, table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"DROP TRIGGER {name}")
        return
    op.execute(f"DROP TRIGGER {name} ON {table}")
    op.execute(f"DROP FUNCTION {name}()")
