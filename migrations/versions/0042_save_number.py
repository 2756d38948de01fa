"""Which save of its attempt a checkpoint is

Revision: 0042. The column is nullable: no row is written, and no lock lasts. A checkpoint that is begun by an older
version has none, and is joined by its step alone.
"""

import sqlalchemy as sa
from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("save_number", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "save_number")
