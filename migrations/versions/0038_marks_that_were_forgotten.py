"""Until when marks of the database's history were forgotten

Revision: 0038. Of what was forgotten before it is not known. The column is nullable: no row is written, and no lock
lasts. The views of samples are made anew as well (`migrations/env.py`): they leave out what a clock dated that was
ahead.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Moment

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("catalog_identity", sa.Column("marks_forgotten_until", Moment, nullable=True))


def downgrade() -> None:
    op.drop_column("catalog_identity", "marks_forgotten_until")
