"""Webhooks call Slack, PagerDuty and Alertmanager too

Revision: 0018. What was there calls as before.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("format", sa.Text(), server_default="standard", nullable=False))


def downgrade() -> None:
    op.drop_column("webhooks", "format")
