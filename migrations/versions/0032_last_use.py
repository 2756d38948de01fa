"""When a token was last used

Revision: 0032. Of what was used before it is not known. The column is nullable: no row is written, and no lock lasts.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Moment

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("last_used_at", Moment, nullable=True))


def downgrade() -> None:
    op.drop_column("tokens", "last_used_at")
