"""Limits of a token of its own

Revision: 0031. Null, which all tokens have that are there: what the settings say.
"""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("requests_per_second", sa.Float(), nullable=True))
    op.add_column("tokens", sa.Column("concurrent_requests", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("tokens", "concurrent_requests")
    op.drop_column("tokens", "requests_per_second")
