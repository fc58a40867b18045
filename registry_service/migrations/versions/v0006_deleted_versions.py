"""Which version a change has deleted, so that watches can tell.

Registries of the schema before leave it out, and so do changes of before.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("changes", sa.Column("deleted_version", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("changes", "deleted_version")
