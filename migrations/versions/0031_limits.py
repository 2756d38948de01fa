"""Limits of a token of its own, and quotas of projects on more than bytes

Revision: 0031. A token that is there has what the settings say, a project that is there no more quotas than it had.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

QUOTAS = (
    "quota_objects",
    "quota_runs",
    "quota_checkpoints",
    "soft_quota_bytes",
    "soft_quota_objects",
    "soft_quota_runs",
    "soft_quota_checkpoints",
)


def upgrade() -> None:
    op.add_column("tokens", sa.Column("requests_per_second", sa.Float(), nullable=True))
    op.add_column("tokens", sa.Column("concurrent_requests", sa.Integer(), nullable=True))
    for name in QUOTAS:
        op.add_column("projects", sa.Column(name, sa.BigInteger(), nullable=True))
    op.add_column("projects", sa.Column("quota_levels", Document, nullable=False, server_default="{}"))
    op.add_column("events", sa.Column("quota", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("events", "quota")
    op.drop_column("projects", "quota_levels")
    for name in reversed(QUOTAS):
        op.drop_column("projects", name)
    op.drop_column("tokens", "concurrent_requests")
    op.drop_column("tokens", "requests_per_second")
