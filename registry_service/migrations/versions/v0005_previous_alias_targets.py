"""What each alias meant before its last change, for a rollback.

A trigger writes it, so that it is also right after changes by registries of the schema before. Whoever moves an alias
sets its update_time while its old targets are still there, as every version of the registry has done.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_KEEP = (
    "DELETE FROM previous_alias_targets WHERE adapter_uid = NEW.adapter_uid AND alias = NEW.name; "
    "INSERT INTO previous_alias_targets (adapter_uid, alias, version, weight) "
    "SELECT t.adapter_uid, t.alias, t.version, t.weight FROM alias_targets AS t "
    "WHERE t.adapter_uid = NEW.adapter_uid AND t.alias = NEW.name;"
)


def upgrade() -> None:
    op.create_table(
        "previous_alias_targets",
        sa.Column("adapter_uid", sa.String(length=36), nullable=False),
        sa.Column("alias", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_uid", "alias"],
            ["aliases.adapter_uid", "aliases.name"],
            name=op.f("fk_previous_alias_targets_adapter_uid_alias"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("adapter_uid", "alias", "version", name=op.f("pk_previous_alias_targets")),
    )
    head = "CREATE TRIGGER aliases_keep_previous_targets AFTER UPDATE OF update_time ON aliases FOR EACH ROW"
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"{head} BEGIN {_KEEP} END")
        return
    op.execute(
        "CREATE FUNCTION aliases_keep_previous_targets() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {_KEEP} RETURN NEW; END $$"
    )
    op.execute(f"{head} EXECUTE FUNCTION aliases_keep_previous_targets()")


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER aliases_keep_previous_targets")
    else:
        op.execute("DROP TRIGGER aliases_keep_previous_targets ON aliases")
        op.execute("DROP FUNCTION aliases_keep_previous_targets()")
    op.drop_table("previous_alias_targets")
