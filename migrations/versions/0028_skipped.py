"""Why an attempt was told to resume where it did

Revision: 0028. Of attempts that were opened before it is not known.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("skipped", Document, nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "skipped")
