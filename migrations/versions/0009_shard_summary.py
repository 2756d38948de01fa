"""A shard keeps all that its rank said of it.

Revision: 0009, after 0008. Of the shards that are there only their checkpoint knows how long training stood still.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("shards", sa.Column("blocked_seconds", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("shards", "blocked_seconds")
