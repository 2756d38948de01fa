"""The roles that see the views for dashboards

Revision: 0022. The views themselves are made after the last revision, by `migrations/env.py`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "dashboard_grants",
        sa.Column("role_name", sa.Text(), primary_key=True),
        sa.Column("project_id", sa.Text(), primary_key=True),
    )


def downgrade() -> None:
    op.drop_table("dashboard_grants")
