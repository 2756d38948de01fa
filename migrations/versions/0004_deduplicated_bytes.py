"""How many bytes each shard, and each checkpoint, did not send because they were there

Revision: 0004, after 0003. Until then the store held chunks only as they are, so the difference of what was needed and
what was sent tells it for the checkpoints that are there.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = ("checkpoints", "shards")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("deduplicated_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE checkpoints SET deduplicated_bytes = chunk_bytes - uploaded_bytes "
        "WHERE committed_at IS NOT NULL AND chunk_bytes > uploaded_bytes"
    )


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "deduplicated_bytes")
