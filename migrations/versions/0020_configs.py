"""The configurations of attempts

Revision: 0020. Attempts that were opened before have none.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("config", Document, nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "config")
