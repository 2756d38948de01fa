"""Repairs: what the promises needed after a hard trial. One function for each subject, called from `upgrade`.

Revision: 0007, after 0006.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What each subject adds."""
    _history()


def downgrade() -> None:
    """What each subject added, taken away in the opposite order."""
    _no_history()


def _history() -> None:
    """What tells that the database went back to an older state."""
    op.add_column("catalog_identity", sa.Column("went_back", sa.Text(), nullable=True))
    op.add_column("catalog_identity", sa.Column("went_back_epoch", sa.Integer(), nullable=True))
    op.create_table(
        "history_marks",
        sa.Column("memory_id", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("moved_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("memory_id", "slot", name="pk_history_marks"),
    )


def _no_history() -> None:
    op.drop_table("history_marks")
    op.drop_column("catalog_identity", "went_back_epoch")
    op.drop_column("catalog_identity", "went_back")
