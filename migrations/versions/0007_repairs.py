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

STEPS_OF_SAVES = (
    "UPDATE attempts SET last_step = begun.step "
    "FROM (SELECT attempt_id, max(step) AS step FROM checkpoints GROUP BY attempt_id) AS begun "
    "WHERE begun.attempt_id = attempts.id AND begun.step > coalesce(attempts.last_step, -1)"
)


def upgrade() -> None:
    """What each subject adds."""
    _history()
    _overwritable_copies()
    _looks_at_damage()
    _rebuild_doubts()
    _sizes_bind_nobody()
    _deleted_runs()
    _steps_of_saves()


def downgrade() -> None:
    """What each subject added, taken away in the opposite order."""
    _no_deleted_runs()
    _sizes_bind_everybody()
    op.drop_table("rebuild_doubts")
    _no_looks_at_damage()
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


def _looks_at_damage() -> None:
    """The order of findings and readings of a chunk's copies, by count; and when a bad one is looked at again."""
    op.add_column("chunks", sa.Column("damages", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("copies", sa.Column("damage", sa.Integer(), nullable=True))
    op.add_column("copies", sa.Column("read_after", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("copies", sa.Column("looks", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("copies", sa.Column("look_at", MOMENT, nullable=True))
    # Until now the moments said which came first.
    op.execute(
        "UPDATE copies SET read_after = 1 WHERE verified_at > "
        "(SELECT max(bad.bad_at) FROM copies bad WHERE bad.chunk_id = copies.chunk_id)"
    )
    op.execute("UPDATE copies SET damage = 1 WHERE bad_at IS NOT NULL")
    op.execute("UPDATE chunks SET damages = 1 WHERE id IN (SELECT chunk_id FROM copies WHERE bad_at IS NOT NULL)")


def _no_looks_at_damage() -> None:
    for name in ("look_at", "looks", "read_after", "damage"):
        op.drop_column("copies", name)
    op.drop_column("chunks", "damages")


def _rebuild_doubts() -> None:
    """What a rebuild could not know; empty in a catalog that was never rebuilt."""
    op.create_table(
        "rebuild_doubts",
        sa.Column("project", sa.Text(), primary_key=True),
        sa.Column("run", sa.Text(), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=True),
    )


def _sizes_bind_nobody() -> None:
    """The size belongs to what a chunk is, and so the rows to what a list is."""
    with op.batch_alter_table("chunks") as chunks:
        chunks.drop_constraint("uq_chunks_project_id_digest", type_="unique")
        chunks.create_unique_constraint("uq_chunks_project_id_digest_bytes", ["project_id", "digest", "bytes"])
    op.add_column("chunk_lists", sa.Column("entries_digest", sa.Text(), nullable=True))
    op.execute("UPDATE chunk_lists SET entries_digest = digest")  # a list like it gets a row of its own
    with op.batch_alter_table("chunk_lists") as lists:
        lists.alter_column("entries_digest", existing_type=sa.Text(), nullable=False)
        lists.drop_constraint("uq_chunk_lists_project_id_digest", type_="unique")
        lists.create_unique_constraint("uq_chunk_lists_project_id_entries_digest", ["project_id", "entries_digest"])


def _sizes_bind_everybody() -> None:
    with op.batch_alter_table("chunk_lists") as lists:
        lists.drop_constraint("uq_chunk_lists_project_id_entries_digest", type_="unique")
        lists.create_unique_constraint("uq_chunk_lists_project_id_digest", ["project_id", "digest"])
        lists.drop_column("entries_digest")
    with op.batch_alter_table("chunks") as chunks:
        chunks.drop_constraint("uq_chunks_project_id_digest_bytes", type_="unique")
        chunks.create_unique_constraint("uq_chunks_project_id_digest", ["project_id", "digest"])


_DELETABLE = ("runs", "projects")


def _deleted_runs() -> None:
    """Who deleted a run or a project, and until when it can be taken back; and what is left of rows that went."""
    forgotten = sa.text("forgotten_at IS NOT NULL")
    op.create_index(
        "ix_checkpoints_forgotten",
        "checkpoints",
        ["forgotten_at"],
        sqlite_where=forgotten,
        postgresql_where=forgotten,
    )
    for table in _DELETABLE:
        op.add_column(table, sa.Column("deleted_at", MOMENT, nullable=True))
        op.add_column(table, sa.Column("deleted_by", sa.Text(), nullable=True))
        op.add_column(table, sa.Column("delete_reason", sa.Text(), nullable=True))
        op.add_column(table, sa.Column("purge_at", MOMENT, nullable=True))
        op.add_column(table, sa.Column("purged_at", MOMENT, nullable=True))
    sums = ("committed", "aborted", "chunk_bytes", "uploaded_bytes", "deduplicated_bytes")
    op.create_table(
        "forgotten_totals",
        sa.Column("project_id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in sums),
        sa.PrimaryKeyConstraint("project_id", name="pk_forgotten_totals"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_forgotten_totals_project_id"),
    )


def _no_deleted_runs() -> None:
    op.drop_table("forgotten_totals")
    op.drop_index("ix_checkpoints_forgotten", table_name="checkpoints")
    for table in _DELETABLE:
        for name in ("purged_at", "purge_at", "delete_reason", "deleted_by", "deleted_at"):
            op.drop_column(table, name)


def _steps_of_saves() -> None:
    """Until now only a commit and a heartbeat moved an attempt's last step. Nothing to take back."""
    op.execute(STEPS_OF_SAVES)
