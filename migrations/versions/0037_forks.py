"""From which checkpoint of another run a run was forked, and its first checkpoint

Revision: 0037. Both columns may be null: nothing was forked before.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

_TABLES = ("runs", "checkpoints")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("forked_from", Document, nullable=True))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "forked_from")
