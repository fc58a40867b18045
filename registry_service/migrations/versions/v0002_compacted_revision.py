"""Up to which revision the change log was compacted."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("compacted_revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    op.add_column("registry_state", column)


def downgrade() -> None:
    op.drop_column("registry_state", "compacted_revision")
