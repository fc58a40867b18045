"""The tables. What must always hold is a constraint here, so that no code path can break it."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

READY, DEPRECATED, DELETED = "READY", "DEPRECATED", "DELETED"
UPSERT, DELETE = "UPSERT", "DELETE"
IS_WANTED = text("residency <> 'ON_DEMAND'")  # replicas shall hold the adapter; word for word as in the index


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC. SQLite keeps no zone: it is taken off before and put back after."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value if value is None or value.tzinfo else value.replace(tzinfo=UTC)


Json = JSON().with_variant(JSONB(), "postgresql")


class Table(DeclarativeBase):
    """Declarative base: names every constraint, so that migrations can name them too."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: Json, list[Any]: Json}  # noqa: RUF012  # SQLAlchemy's


class BaseModel(Table):
    __tablename__ = "base_models"

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    architecture: Mapped[str] = mapped_column(String(255))
    fingerprint: Mapped[str] = mapped_column(String(71))
    weights_fingerprint: Mapped[str | None] = mapped_column(String(255))
    config_json: Mapped[str] = mapped_column(Text)
    num_modules: Mapped[int] = mapped_column(Integer)
    create_time: Mapped[datetime]


class Adapter(Table):
    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("namespace", "name"),
        Index("ix_adapters_delete_time", "delete_time"),
        Index("ix_adapters_namespace_create_time", "namespace", "create_time"),
        Index("ix_adapters_namespace_update_time", "namespace", "update_time"),
        Index("ix_adapters_wanted", "namespace", "name", sqlite_where=IS_WANTED, postgresql_where=IS_WANTED),
        Index("ix_adapters_labels", "labels", postgresql_using="gin").ddl_if(dialect="postgresql"),
        CheckConstraint("next_version >= 1", name="next_version"),
        CheckConstraint("residency IN ('ON_DEMAND', 'PRELOAD', 'PINNED')", name="residency"),
    )

    uid: Mapped[str] = mapped_column(String(36), primary_key=True)
    namespace: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.id"))
    next_version: Mapped[int] = mapped_column(Integer, default=1)
    default_alias: Mapped[str] = mapped_column(String(63), default="latest")
    residency: Mapped[str] = mapped_column(String(16), default="ON_DEMAND")
    labels: Mapped[dict[str, Any]]
    annotations: Mapped[dict[str, Any]]
    description: Mapped[str] = mapped_column(Text)
    generation: Mapped[int] = mapped_column(BigInteger, default=1)
    create_time: Mapped[datetime]
    update_time: Mapped[datetime]
    delete_time: Mapped[datetime | None]
    purge_time: Mapped[datetime | None]

    @property
    def etag(self) -> str:
        """Changes with every change of the adapter's row or aliases."""
        return f'"{self.uid[:8]}-{self.generation}"'


class AdapterVersion(Table):
    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_uid", "number"),
        CheckConstraint("number >= 1", name="number"),
        CheckConstraint("state IN ('READY', 'DEPRECATED', 'DELETED')", name="state"),
        Index("ix_adapter_versions_purge_time", "purge_time"),
        Index(
            "uq_adapter_versions_live_digest",
            "adapter_uid",
            "digest",
            unique=True,
            sqlite_where=text("state <> 'DELETED'"),
            postgresql_where=text("state <> 'DELETED'"),
        ),
    )

    uid: Mapped[str] = mapped_column(String(36), primary_key=True)
    adapter_uid: Mapped[str] = mapped_column(ForeignKey("adapters.uid"))
    number: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(String(71))
    source: Mapped[dict[str, Any]]
    pinned_sources: Mapped[list[Any]]
    manifest: Mapped[list[Any]]
    lora_config: Mapped[dict[str, Any]]
    warnings: Mapped[list[Any]]
    base_model_fingerprint: Mapped[str] = mapped_column(String(71))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    num_tensors: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16), default=READY)
    creator: Mapped[str] = mapped_column(String(255))
    create_time: Mapped[datetime]
    delete_time: Mapped[datetime | None]
    purge_time: Mapped[datetime | None]


class Tombstone(Table):
    """What is left of a purged adapter: its name's next version, so that no number is used twice. Triggers write it."""

    __tablename__ = "tombstones"

    namespace: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    next_version: Mapped[int] = mapped_column(Integer)


class Alias(Table):
    __tablename__ = "aliases"
    __table_args__ = (CheckConstraint("name <> 'latest'", name="not_latest"),)

    adapter_uid: Mapped[str] = mapped_column(ForeignKey("adapters.uid"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    update_time: Mapped[datetime]


class AliasTarget(Table):
    """One version that an alias names, of the same adapter."""

    __tablename__ = "alias_targets"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_uid", "alias"], ["aliases.adapter_uid", "aliases.name"], ondelete="CASCADE"),
        ForeignKeyConstraint(["adapter_uid", "version"], ["adapter_versions.adapter_uid", "adapter_versions.number"]),
        CheckConstraint("weight > 0", name="weight"),
    )

    adapter_uid: Mapped[str] = mapped_column(String(36), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    weight: Mapped[float] = mapped_column(Float)


class PreviousAliasTarget(Table):
    """One version that an alias named before its last change; it may be gone by now. A trigger writes these."""

    __tablename__ = "previous_alias_targets"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_uid", "alias"], ["aliases.adapter_uid", "aliases.name"], ondelete="CASCADE"),
    )

    adapter_uid: Mapped[str] = mapped_column(String(36), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    weight: Mapped[float] = mapped_column(Float)


class RequestId(Table):
    """The answer to a registration, for a retry with the same id."""

    __tablename__ = "request_ids"
    __table_args__ = (Index("ix_request_ids_expire_time", "expire_time"),)

    caller: Mapped[str] = mapped_column(String(255), primary_key=True)
    namespace: Mapped[str] = mapped_column(String(63), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    request_hash: Mapped[str] = mapped_column(String(64))
    version_uid: Mapped[str] = mapped_column(ForeignKey("adapter_versions.uid"))
    created: Mapped[bool]
    revision: Mapped[int] = mapped_column(BigInteger)
    expire_time: Mapped[datetime]


class RegistryState(Table):
    """The only row: how many changes were committed, up to which the log has forgotten them, and a mark of this
    database's life."""

    __tablename__ = "registry_state"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    revision: Mapped[int] = mapped_column(BigInteger)
    epoch: Mapped[str] = mapped_column(String(36))
    compacted_revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))


class Change(Table):
    """One committed change of an adapter, in commit order. `deleted_version`: the one that it deleted, if it did."""

    __tablename__ = "changes"
    __table_args__ = (
        CheckConstraint("kind IN ('UPSERT', 'DELETE')", name="kind"),
        Index("ix_changes_adapter_uid", "adapter_uid"),
    )

    revision: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    adapter_uid: Mapped[str] = mapped_column(ForeignKey("adapters.uid"))
    kind: Mapped[str] = mapped_column(String(16))
    create_time: Mapped[datetime]
    deleted_version: Mapped[int | None] = mapped_column(Integer)


class Replica(Table):
    """An inference replica, until its lease ends. Heartbeats write here and nowhere else."""

    __tablename__ = "replicas"
    __table_args__ = (Index("ix_replicas_base_model", "base_model"),)

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.id"))
    observed_revision: Mapped[int] = mapped_column(BigInteger)
    lease_expire_time: Mapped[datetime]


class Resident(Table):
    """What a replica holds of one adapter version's content."""

    __tablename__ = "residents"
    __table_args__ = (
        ForeignKeyConstraint(["replica"], ["replicas.name"], ondelete="CASCADE"),
        CheckConstraint("level IN ('DISK', 'HOST', 'GPU', 'FAILED')", name="level"),
        Index("ix_residents_digest", "digest"),
    )

    replica: Mapped[str] = mapped_column(String(128), primary_key=True)
    digest: Mapped[str] = mapped_column(String(71), primary_key=True)
    level: Mapped[str] = mapped_column(String(16))
    pinned: Mapped[bool]
    reason: Mapped[str] = mapped_column(String(255))
