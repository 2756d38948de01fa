"""Which versions can work with a newer catalog

Revision: 0035. `works_from` is the oldest revision whose code works with the catalog as it is: a service of that
version or a newer one starts on it, though it does not know the newest revisions. A revision that takes something away
that an older version needs moves `works_from` to itself; see docs/adr/0076.
"""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("catalog_identity", sa.Column("works_from", sa.Text(), server_default="0035", nullable=False))


def downgrade() -> None:
    op.drop_column("catalog_identity", "works_from")
