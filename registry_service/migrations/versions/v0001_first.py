"""Base models, adapters, versions, aliases, request ids and the change log."""

import uuid

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    for create in (_base_models, _adapters, _adapter_versions, _aliases, _alias_targets, _request_ids, _changes):
        create()
    _registry_state()


def downgrade() -> None:
    op.drop_index("uq_adapter_versions_live_digest", table_name="adapter_versions")
    op.drop_index("ix_request_ids_expire_time", table_name="request_ids")
    for table in ("request_ids", "alias_targets", "changes", "aliases", "adapter_versions", "adapters"):
        op.drop_table(table)
    op.drop_table("registry_state")
    op.drop_table("base_models")


def _base_models() -> None:
    op.create_table(
        "base_models",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("architecture", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=71), nullable=False),
        sa.Column("weights_fingerprint", sa.String(length=255), nullable=True),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("num_modules", sa.Integer(), nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base_models")),
    )


def _registry_state() -> None:
    table = op.create_table(
        "registry_state",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.String(length=36), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_registry_state_single")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry_state")),
    )
    op.bulk_insert(table, [{"id": 1, "revision": 0, "epoch": str(uuid.uuid4())}])


def _adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("base_model", sa.String(length=63), nullable=False),
        sa.Column("next_version", sa.Integer(), nullable=False),
        sa.Column("default_alias", sa.String(length=63), nullable=False),
        sa.Column("residency", sa.String(length=16), nullable=False),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("annotations", JSON, nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        sa.Column("update_time", TIME, nullable=False),
        sa.Column("delete_time", TIME, nullable=True),
        sa.Column("purge_time", TIME, nullable=True),
        sa.CheckConstraint("residency IN ('ON_DEMAND', 'PRELOAD', 'PINNED')", name=op.f("ck_adapters_residency")),
        sa.CheckConstraint("next_version >= 1", name=op.f("ck_adapters_next_version")),
        sa.ForeignKeyConstraint(["base_model"], ["base_models.id"], name=op.f("fk_adapters_base_model")),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_adapters")),
        sa.UniqueConstraint("namespace", "name", name=op.f("uq_adapters_namespace_name")),
    )


def _adapter_versions() -> None:
    op.create_table(
        "adapter_versions",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("adapter_uid", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("source", JSON, nullable=False),
        sa.Column("pinned_sources", JSON, nullable=False),
        sa.Column("manifest", JSON, nullable=False),
        sa.Column("lora_config", JSON, nullable=False),
        sa.Column("warnings", JSON, nullable=False),
        sa.Column("base_model_fingerprint", sa.String(length=71), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_tensors", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("creator", sa.String(length=255), nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        sa.Column("delete_time", TIME, nullable=True),
        sa.Column("purge_time", TIME, nullable=True),
        sa.CheckConstraint("state IN ('READY', 'DEPRECATED', 'DELETED')", name=op.f("ck_adapter_versions_state")),
        sa.CheckConstraint("number >= 1", name=op.f("ck_adapter_versions_number")),
        sa.ForeignKeyConstraint(["adapter_uid"], ["adapters.uid"], name=op.f("fk_adapter_versions_adapter_uid")),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint("adapter_uid", "number", name=op.f("uq_adapter_versions_adapter_uid_number")),
    )
    op.create_index(
        "uq_adapter_versions_live_digest",
        "adapter_versions",
        ["adapter_uid", "digest"],
        unique=True,
        sqlite_where=sa.text("state <> 'DELETED'"),
        postgresql_where=sa.text("state <> 'DELETED'"),
    )


def _aliases() -> None:
    op.create_table(
        "aliases",
        sa.Column("adapter_uid", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("update_time", TIME, nullable=False),
        sa.CheckConstraint("name <> 'latest'", name=op.f("ck_aliases_not_latest")),
        sa.ForeignKeyConstraint(["adapter_uid"], ["adapters.uid"], name=op.f("fk_aliases_adapter_uid")),
        sa.PrimaryKeyConstraint("adapter_uid", "name", name=op.f("pk_aliases")),
    )


def _alias_targets() -> None:
    op.create_table(
        "alias_targets",
        sa.Column("adapter_uid", sa.String(length=36), nullable=False),
        sa.Column("alias", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.CheckConstraint("weight > 0", name=op.f("ck_alias_targets_weight")),
        sa.ForeignKeyConstraint(
            ["adapter_uid", "alias"],
            ["aliases.adapter_uid", "aliases.name"],
            name=op.f("fk_alias_targets_adapter_uid_alias"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["adapter_uid", "version"],
            ["adapter_versions.adapter_uid", "adapter_versions.number"],
            name=op.f("fk_alias_targets_adapter_uid_version"),
        ),
        sa.PrimaryKeyConstraint("adapter_uid", "alias", "version", name=op.f("pk_alias_targets")),
    )


def _request_ids() -> None:
    op.create_table(
        "request_ids",
        sa.Column("caller", sa.String(length=255), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("version_uid", sa.String(length=36), nullable=False),
        sa.Column("created", sa.Boolean(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("expire_time", TIME, nullable=False),
        sa.ForeignKeyConstraint(["version_uid"], ["adapter_versions.uid"], name=op.f("fk_request_ids_version_uid")),
        sa.PrimaryKeyConstraint("caller", "namespace", "request_id", name=op.f("pk_request_ids")),
    )
    op.create_index("ix_request_ids_expire_time", "request_ids", ["expire_time"], unique=False)


def _changes() -> None:
    op.create_table(
        "changes",
        sa.Column("revision", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("adapter_uid", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        sa.CheckConstraint("kind IN ('UPSERT', 'DELETE')", name=op.f("ck_changes_kind")),
        sa.ForeignKeyConstraint(["adapter_uid"], ["adapters.uid"], name=op.f("fk_changes_adapter_uid")),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_changes")),
    )
