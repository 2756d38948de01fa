"""How long each rank took to upload its shard.

Revision: 0010, after 0009.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("shards", sa.Column("upload_seconds", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("shards", "upload_seconds")
