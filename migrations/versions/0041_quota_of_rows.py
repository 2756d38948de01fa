"""Quotas of projects on rows of the catalog, and how many entries a chunk list has

Revision: 0041. The columns are nullable: no row is written, and no lock lasts. The controller `tally` counts the
entries of the lists that are there, and of those that an older version goes on making.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import RowId

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("quota_rows", "soft_quota_rows"):
        op.add_column("projects", sa.Column(name, sa.BigInteger(), nullable=True))
    op.add_column("chunk_lists", sa.Column("entries", sa.Integer(), nullable=True))
    op.create_table(
        "list_tallies",
        sa.Column("project_id", sa.Text(), primary_key=True),
        sa.Column("entries", sa.BigInteger(), server_default="0", nullable=False),
    )
    op.create_table(
        "list_deltas",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("project_id", sa.Text(), nullable=False, index=True),
        sa.Column("entries", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("list_deltas")
    op.drop_table("list_tallies")
    op.drop_column("chunk_lists", "entries")
    for name in ("soft_quota_rows", "quota_rows"):
        op.drop_column("projects", name)
