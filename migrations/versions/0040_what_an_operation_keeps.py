"""What an operation keeps for its next try

Revision: 0040. The column is nullable: no row is written, and no lock lasts. An older worker that goes on with an
operation begins it anew.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("kept", Document, nullable=True))


def downgrade() -> None:
    op.drop_column("operations", "kept")
