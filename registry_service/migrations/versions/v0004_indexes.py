"""Indexes for lists by time and by label, and for what replicas shall hold.

On Postgres `registry_service.migrations.online` has built them before, where there were tables: then nothing is left to
do here. SQLite has no index for labels of any key; a list by label reads its adapters there.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# By dialect: (name, what follows "CREATE INDEX [CONCURRENTLY] IF NOT EXISTS name").
_BOTH = (
    ("ix_adapters_namespace_create_time", "ON adapters (namespace, create_time)"),
    ("ix_adapters_namespace_update_time", "ON adapters (namespace, update_time)"),
    ("ix_adapters_wanted", "ON adapters (namespace, name) WHERE residency <> 'ON_DEMAND'"),
)
INDEXES = {
    "sqlite": _BOTH,
    "postgresql": (*_BOTH, ("ix_adapters_labels", "ON adapters USING gin (labels)")),
}


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for name, rest in INDEXES[dialect]:
        op.execute(sa.text(f"CREATE INDEX IF NOT EXISTS {name} {rest}"))
    if dialect == "sqlite" and _has_statistics():
        op.execute(sa.text("ANALYZE adapters"))  # an index that they do not know is taken for the best


def _has_statistics() -> bool:
    return bool(op.get_bind().scalar(sa.text("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'")))


def downgrade() -> None:
    for name, _ in INDEXES[op.get_bind().dialect.name]:
        op.drop_index(name, table_name="adapters")
