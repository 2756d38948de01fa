"""What tells two databases apart that hold the same epoch of one catalog

Revision: 0029. It is empty until the epoch is raised, as in the markers that the stores have: a service goes on.
"""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("catalog_identity", sa.Column("claim", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("catalog_identity", "claim")
