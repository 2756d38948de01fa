"""Repairs: what the promises needed after a hard trial. One function for each subject, called from `upgrade`.

Revision: 0007, after 0006.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)

COPY_TO_READ = "state = 'suspect' OR (state = 'verified' AND proof IN ('unproven', 'read_early'))"
COPY_TO_READ_BEFORE = "state = 'suspect' OR (state = 'verified' AND proof = 'unproven')"


def upgrade() -> None:
    """What each subject adds."""
    _history()
    _overwritable_copies()


def downgrade() -> None:
    """What each subject added, taken away in the opposite order."""
    _no_overwritable_copies()
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


def _overwritable_copies() -> None:
    op.add_column("copies", sa.Column("overwritable_until", MOMENT, nullable=True))
    _index_copies_to_read(COPY_TO_READ)


def _no_overwritable_copies() -> None:
    op.execute("UPDATE copies SET proof = 'unproven' WHERE proof = 'read_early'")
    _index_copies_to_read(COPY_TO_READ_BEFORE)
    op.drop_column("copies", "overwritable_until")


def _index_copies_to_read(where: str) -> None:
    op.drop_index("ix_copies_to_read", table_name="copies")
    condition = sa.text(where)
    op.create_index("ix_copies_to_read", "copies", ["id"], sqlite_where=condition, postgresql_where=condition)
