"""Passes of controllers read what is due, in portions

Revision: 0017. Indexes for what a run has committed, for what is going, and for records that were removed; and
the full scan of the collector says in which table it is.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_INDEXES = (
    ("ix_checkpoints_committed", "checkpoints", ["run_id", "committed_at"], "committed_at IS NOT NULL"),
    ("ix_checkpoints_going", "checkpoints", ["state", "id"], "state IN ('deleting', 'deleted')"),
    ("ix_written_records_removed", "written_records", ["store_id", "removed_at"], "removed_at IS NOT NULL"),
)


def upgrade() -> None:
    for name, table, columns, where in _INDEXES:
        op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.add_column("store_maintenance", sa.Column("scanning", sa.Text(), nullable=True))
    op.alter_column("store_maintenance", "scanned_copy_id", new_column_name="scanned_id")
    # A scan under way begins anew.
    op.execute("UPDATE store_maintenance SET scanned_id = NULL, scan_began_at = NULL WHERE scanned_id IS NOT NULL")


def downgrade() -> None:
    op.execute("UPDATE store_maintenance SET scanned_id = NULL, scan_began_at = NULL WHERE scanned_id IS NOT NULL")
    op.alter_column("store_maintenance", "scanned_id", new_column_name="scanned_copy_id")
    op.drop_column("store_maintenance", "scanning")
    for name, table, *_ in _INDEXES:
        op.drop_index(name, table)
