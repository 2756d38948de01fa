"""How many ranks of a checkpoint have sealed

Revision: 0013. Each seal counted the others' until now. See `training/commit.py`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("sealed_ranks", sa.Integer(), server_default="0", nullable=False))
    op.execute(
        "UPDATE checkpoints SET sealed_ranks = (SELECT count(*) FROM shards "
        "WHERE shards.checkpoint_id = checkpoints.id AND shards.state = 'sealed')"
    )


def downgrade() -> None:
    op.drop_column("checkpoints", "sealed_ranks")
