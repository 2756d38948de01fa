"""Sums that are kept beside the rows, in place of counting

Revision: 0014. What checkpoints add up to is filled in here. Every copy is counted as arriving at first; what its bytes
are kept for the controller `tally` finds out, and until it has been at all of them the figures say so.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Moment, RowId

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_SUMS = (
    "uploading",
    "committed",
    "logical_bytes",
    "deduplicated_bytes",
    "ever_committed",
    "ever_aborted",
    "ever_chunk_bytes",
    "ever_uploaded_bytes",
    "ever_deduplicated_bytes",
)
_OF_ROWS = """
    sum(CASE WHEN c.state = 'uploading' THEN 1 ELSE 0 END),
    sum(CASE WHEN c.state = 'committed' THEN 1 ELSE 0 END),
    sum(CASE WHEN c.state = 'committed' THEN c.logical_bytes ELSE 0 END),
    sum(CASE WHEN c.state = 'committed' THEN c.deduplicated_bytes ELSE 0 END),
    count(c.committed_at),
    count(c.aborted_at),
    sum(CASE WHEN c.committed_at IS NOT NULL THEN c.chunk_bytes ELSE 0 END),
    sum(CASE WHEN c.committed_at IS NOT NULL THEN c.uploaded_bytes ELSE 0 END),
    sum(CASE WHEN c.committed_at IS NOT NULL THEN c.deduplicated_bytes ELSE 0 END)
"""


def upgrade() -> None:
    sums = lambda: [sa.Column(name, sa.BigInteger(), server_default="0", nullable=False) for name in _SUMS]  # noqa: E731
    op.create_table(
        "checkpoint_tallies",
        sa.Column("project_id", sa.Text(), primary_key=True),
        sa.Column("run_id", sa.Text(), primary_key=True),
        *sums(),
    )
    op.create_table(
        "checkpoint_deltas",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        *sums(),
    )
    op.create_index("ix_checkpoint_deltas_project_id_run_id", "checkpoint_deltas", ["project_id", "run_id"])
    op.create_table(
        "byte_tallies",
        sa.Column("project_id", sa.Text(), primary_key=True),
        sa.Column("store_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("storage_class", sa.Text(), primary_key=True),
        sa.Column("counted", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("copies", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
    )
    op.create_table(
        "byte_deltas",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("project_id", sa.Text(), nullable=False, index=True),
        sa.Column("store_id", sa.BigInteger(), nullable=False),
        sa.Column("storage_class", sa.Text(), nullable=False),
        sa.Column("counted", sa.SmallInteger(), nullable=False),
        sa.Column("copies", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "recount_marks",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("chunk_id", sa.BigInteger()),
        sa.Column("checkpoint_id", sa.Text()),
        sa.Column("keeps", sa.Boolean(), nullable=False),
        sa.Column("after_shard_id", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("due_at", Moment(), nullable=False),
    )
    op.create_index("ix_recount_marks_due_at", "recount_marks", ["due_at", "id"])
    named = sa.text("checkpoint_id IS NOT NULL")
    op.create_index(
        "ix_recount_marks_checkpoint_id",
        "recount_marks",
        ["checkpoint_id"],
        sqlite_where=named,
        postgresql_where=named,
    )
    op.create_table(
        "tally_comparisons",
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("position", sa.Text()),
        sa.Column("began_at", Moment()),
        sa.Column("ended_at", Moment()),
        sa.Column("drifted", sa.BigInteger(), server_default="0", nullable=False),
    )
    leased = sa.text("leased_until IS NOT NULL")
    op.create_index(
        "ix_written_records_leased",
        "written_records",
        ["leased_until"],
        sqlite_where=leased,
        postgresql_where=leased,
    )
    op.add_column("copies", sa.Column("counted", sa.SmallInteger(), server_default="0", nullable=False))
    _fill()


def _fill() -> None:
    of_runs = "FROM runs r JOIN checkpoints c ON c.run_id = r.id GROUP BY r.project_id{}"
    columns = f"INSERT INTO checkpoint_tallies (project_id, run_id, {', '.join(_SUMS)}) SELECT r.project_id"
    op.execute(f"{columns}, r.id, {_OF_ROWS} {of_runs.format(', r.id')}")
    op.execute(f"{columns}, '', {_OF_ROWS} {of_runs.format('')}")
    op.execute(
        "INSERT INTO byte_tallies (project_id, store_id, storage_class, counted, copies, bytes) "
        "SELECT project_id, store_id, COALESCE(storage_class, ''), 0, count(*), sum(stored_bytes) FROM copies "
        "WHERE state <> 'gone' GROUP BY project_id, store_id, COALESCE(storage_class, '')"
    )
    # What ends by itself counts for something else from then on.
    op.execute(
        "INSERT INTO recount_marks (checkpoint_id, keeps, due_at) "
        "SELECT id, true, pinned_until FROM checkpoints WHERE pinned_until > CURRENT_TIMESTAMP"
    )
    op.execute(
        "INSERT INTO recount_marks (checkpoint_id, keeps, due_at) "
        "SELECT checkpoint_id, true, retain_until FROM holds WHERE retain_until > CURRENT_TIMESTAMP"
    )
    # Of a catalog without copies all is known.
    op.execute(
        "INSERT INTO tally_comparisons (kind, drifted, ended_at) "
        "SELECT 'copies', 0, CURRENT_TIMESTAMP WHERE NOT EXISTS (SELECT 1 FROM copies)"
    )


def downgrade() -> None:
    op.drop_index("ix_written_records_leased", "written_records")
    with op.batch_alter_table("copies") as copies:
        copies.drop_column("counted")
    for table in (
        "tally_comparisons",
        "recount_marks",
        "byte_deltas",
        "byte_tallies",
        "checkpoint_deltas",
        "checkpoint_tallies",
    ):
        op.drop_table(table)
