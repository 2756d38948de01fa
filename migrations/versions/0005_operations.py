"""Custody: pins, trash, policies, holds, tiers, operations, audit events, and what controllers say of themselves

Revision: 0005, after 0004. Nothing of what is there changes: no checkpoint is in the trash, every record is due.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TRASHED = sa.text("state = 'trashed'")
LOCKED = sa.text("lock IS NOT NULL")
LEASED = sa.text("leased_until IS NOT NULL")
DAMAGED = sa.text("state = 'bad' AND bad_at IS NOT NULL AND repaired_at IS NULL")
TO_COOL = sa.text("tier_wanted IS NOT NULL AND state = 'committed'")
TO_COPY = sa.text("wanted AND complete_at IS NULL")
THAWED = sa.text("thawed_until IS NOT NULL")
TO_RECORD = sa.text("recorded_version < version AND state IN ('committed', 'trashed')")
TO_FORGET = sa.text("state IN ('aborted', 'deleted') AND forgotten_at IS NULL")
SUBJECT_TO_RECORD = sa.text("recorded_version < version")
UNDER_WAY = sa.text("ended_at IS NULL AND cancel_requested_at IS NULL")

CONTROLLER_COLUMNS = (
    ("paused_at", MOMENT),
    ("paused_by", sa.Text()),
    ("pause_reason", sa.Text()),
    ("run_requested_at", MOMENT),
    ("run_answered_at", MOMENT),
    ("leased_until", MOMENT),
    ("lease_token", sa.Text()),
    ("began_at", MOMENT),
    ("ended_at", MOMENT),
    ("pass_seconds", sa.Float()),
    ("report", DOCUMENT),
    ("report_at", MOMENT),
    ("error", sa.Text()),
    ("error_at", MOMENT),
)
CHECKPOINT_COLUMNS = (
    ("lost_chunk_id", sa.BigInteger()),
    ("pinned_at", MOMENT),
    ("pinned_by", sa.Text()),
    ("pin_reason", sa.Text()),
    ("pinned_until", MOMENT),
    ("trashed_at", MOMENT),
    ("trashed_by", sa.Text()),
    ("trash_reason", sa.Text()),
    ("purge_at", MOMENT),
    ("deleted_at", MOMENT),
    ("thaw_requested_at", MOMENT),
    ("thaw_expected_at", MOMENT),
    ("thawed_until", MOMENT),
    ("thaw_speed", sa.Text()),
    ("thaw_days", sa.Integer()),
    ("tier_wanted", sa.Text()),
    ("tier_checked_at", MOMENT),
    ("cold_class", sa.Text()),
    ("readable_until", MOMENT),
    ("forgotten_at", MOMENT),
)
COPY_COLUMNS = (
    ("storage_class", sa.Text()),
    ("thaw_requested_at", MOMENT),
    ("readable_until", MOMENT),
    ("lock", sa.Text()),
    ("bad_at", MOMENT),
    ("finding", sa.Text()),
    ("repaired_at", MOMENT),
)


def upgrade() -> None:
    for name, kind in CONTROLLER_COLUMNS:
        op.add_column("controllers", sa.Column(name, kind, nullable=True))
    for name in ("done", "failed"):
        op.add_column("controllers", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("created_by_token", sa.Text(), nullable=True))
    for name, kind in CHECKPOINT_COLUMNS:
        op.add_column("checkpoints", sa.Column(name, kind, nullable=True))
    op.add_column("checkpoints", sa.Column("recorded_version", sa.Integer(), nullable=False, server_default="0"))
    op.create_index(
        "ix_checkpoints_trashed_purge", "checkpoints", ["purge_at"], sqlite_where=TRASHED, postgresql_where=TRASHED
    )
    op.create_index(
        "ix_checkpoints_to_cool",
        "checkpoints",
        ["tier_checked_at", "id"],
        sqlite_where=TO_COOL,
        postgresql_where=TO_COOL,
    )
    op.create_index("ix_checkpoints_thawed", "checkpoints", ["id"], sqlite_where=THAWED, postgresql_where=THAWED)
    op.create_index(
        "ix_checkpoints_to_record", "checkpoints", ["id"], sqlite_where=TO_RECORD, postgresql_where=TO_RECORD
    )
    op.create_index(
        "ix_checkpoints_to_forget", "checkpoints", ["id"], sqlite_where=TO_FORGET, postgresql_where=TO_FORGET
    )
    for name, kind in COPY_COLUMNS:
        op.add_column("copies", sa.Column(name, kind, nullable=True))
    op.create_index("ix_copies_store_id_state_verified_at", "copies", ["store_id", "state", "verified_at"])
    op.create_index("ix_copies_locked", "copies", ["id"], sqlite_where=LOCKED, postgresql_where=LOCKED)
    op.create_index("ix_shard_chunks_copy_id", "shard_chunks", ["copy_id"])
    op.create_index("ix_copies_leased", "copies", ["leased_until"], sqlite_where=LEASED, postgresql_where=LEASED)
    op.create_index("ix_copies_damaged", "copies", ["id"], sqlite_where=DAMAGED, postgresql_where=DAMAGED)
    _workers()
    _policies()
    _retention_marks()
    _holds()
    _operations()
    _audit_events()
    _checkpoint_copies()
    _price_lists()
    _records()
    _scrub_totals()
    _collection()


def _workers() -> None:
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("stores", DOCUMENT, nullable=False),
        sa.Column("done", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False, server_default=""),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_policies_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_policies"),
        sa.UniqueConstraint("project_id", "run_id", "kind", name="uq_policies_project_id_run_id_kind"),
    )


def _retention_marks() -> None:
    op.create_table(
        "retention_marks",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("looked_at", MOMENT, nullable=True),
        sa.Column("policy_digest", sa.Text(), nullable=True),
        sa.Column("newest_at", MOMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_retention_marks_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_retention_marks"),
    )


def _holds() -> None:
    op.create_table(
        "holds",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("retain_until", MOMENT, nullable=True),
        sa.Column("mirror", sa.Boolean(), nullable=False),
        sa.Column("mirrored_at", MOMENT, nullable=True),
        sa.Column("mirror_error", sa.Text(), nullable=True),
        sa.Column("placed_at", MOMENT, nullable=False),
        sa.Column("placed_by_token", sa.Text(), nullable=False),
        sa.Column("placed_by", sa.Text(), nullable=False),
        sa.Column("released_at", MOMENT, nullable=True),
        sa.Column("released_by", sa.Text(), nullable=True),
        sa.Column("release_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_holds_checkpoint_id"),
        sa.PrimaryKeyConstraint("id", name="pk_holds"),
    )
    op.create_index("ix_holds_checkpoint_id", "holds", ["checkpoint_id"])


def _operations() -> None:
    op.create_table(
        "operations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("checkpoint_id", sa.Text(), nullable=True),
        sa.Column("arguments", DOCUMENT, nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("progress", DOCUMENT, nullable=False),
        sa.Column("result", DOCUMENT, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_by_token", sa.Text(), nullable=False),
        sa.Column("started_at", MOMENT, nullable=True),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("cancel_requested_at", MOMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_operations_project_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_operations_run_id"),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_operations_checkpoint_id"),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
    )
    op.create_index("ix_operations_state", "operations", ["state", "created_at"])
    op.create_index("ix_operations_project_id", "operations", ["project_id", "created_at"])
    op.create_index(
        "uq_operations_open_fingerprint",
        "operations",
        ["fingerprint"],
        unique=True,
        sqlite_where=UNDER_WAY,
        postgresql_where=UNDER_WAY,
    )


def _audit_events() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("actor_kind", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("checkpoint_id", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("before", DOCUMENT, nullable=True),
        sa.Column("after", DOCUMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_events"),
    )
    op.create_index("ix_audit_events_project_id", "audit_events", ["project_id", "id"])
    op.create_index("ix_audit_events_checkpoint_id", "audit_events", ["checkpoint_id", "id"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_change_of_event() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'audit events are append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_events "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_event()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_events_no_{change.lower()} BEFORE {change} ON audit_events "
            "BEGIN SELECT RAISE(ABORT, 'audit events are append-only'); END"
        )


def _checkpoint_copies() -> None:
    op.create_table(
        "checkpoint_copies",
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("wanted", sa.Boolean(), nullable=False),
        sa.Column("policy_at", MOMENT, nullable=True),
        sa.Column("checkpoint_version", sa.Integer(), nullable=False),
        sa.Column("missing_bytes", sa.BigInteger(), nullable=False),
        sa.Column("complete_at", MOMENT, nullable=True),
        sa.Column("retry_at", MOMENT, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_copies_checkpoint_id"),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_checkpoint_copies_store_id"),
        sa.PrimaryKeyConstraint("checkpoint_id", "store_id", name="pk_checkpoint_copies"),
    )
    op.create_index(
        "ix_checkpoint_copies_to_copy",
        "checkpoint_copies",
        ["store_id", "checkpoint_id"],
        sqlite_where=TO_COPY,
        postgresql_where=TO_COPY,
    )


def _price_lists() -> None:
    op.create_table(
        "price_lists",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_price_lists"),
    )


def _scrub_totals() -> None:
    op.create_table(
        "scrub_totals",
        sa.Column("store_id", ROW_ID, nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
            for name in ("read_copies", "read_bytes", "bad_copies", "repaired_copies")
        ),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_scrub_totals_store_id"),
        sa.PrimaryKeyConstraint("store_id", name="pk_scrub_totals"),
    )


def _collection() -> None:
    op.create_table(
        "collect_candidates",
        sa.Column("chunk_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("due_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("chunk_id", name="pk_collect_candidates"),
    )
    op.create_index("ix_collect_candidates_due_at", "collect_candidates", ["due_at"])
    op.create_table(
        "store_maintenance",
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("scan_began_at", MOMENT, nullable=True),
        sa.Column("scanned_copy_id", sa.BigInteger(), nullable=True),
        sa.Column("swept_at", MOMENT, nullable=True),
        sa.Column("sweep", DOCUMENT, nullable=True),
        sa.Column("sweep_leased_until", MOMENT, nullable=True),
        sa.Column("sweep_token", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_store_care_store_id"),
        sa.PrimaryKeyConstraint("store_id", name="pk_store_care"),
    )


def _records() -> None:
    for name, kind in (("place", sa.Text()), ("rebuilding_from", sa.Text())):
        op.add_column("catalog_identity", sa.Column(name, kind, nullable=True))
    for name, kind in (("checked_at", MOMENT), ("checked_epoch", sa.Integer()), ("checked_whole", sa.Boolean())):
        op.add_column("stores", sa.Column(name, kind, nullable=True))
    op.create_table(
        "record_subjects",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("recorded_version", sa.Integer(), nullable=False, server_default="0"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_record_subjects_project_id"),
        sa.PrimaryKeyConstraint("kind", "subject_id", name="pk_record_subjects"),
    )
    op.create_index(
        "ix_record_subjects_to_record",
        "record_subjects",
        ["subject_id"],
        sqlite_where=SUBJECT_TO_RECORD,
        postgresql_where=SUBJECT_TO_RECORD,
    )
    op.execute(
        "INSERT INTO record_subjects (kind, subject_id, project_id, version) SELECT 'project', id, id, 1 FROM projects"
    )
    op.execute(
        "INSERT INTO record_subjects (kind, subject_id, project_id, version) SELECT 'run', id, project_id, 1 FROM runs"
    )
    op.create_table(
        "written_records",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("removed_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_written_records_store_id"),
        sa.PrimaryKeyConstraint("kind", "subject_id", "store_id", name="pk_written_records"),
    )
    op.create_index("ix_written_records_store_id_kind", "written_records", ["store_id", "kind"])
    op.create_table(
        "found_encodings",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("stored_digest", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "digest", "stored_bytes", name="pk_found_encodings"),
    )


def downgrade() -> None:
    # What lies beside the data stays there, and grows old.
    for table in ("found_encodings", "written_records", "record_subjects"):
        op.drop_table(table)
    for name in ("checked_at", "checked_epoch", "checked_whole"):
        op.drop_column("stores", name)
    for name in ("place", "rebuilding_from"):
        op.drop_column("catalog_identity", name)
    op.drop_table("checkpoint_copies")
    # The version before cannot read what is cold, and never purges: what is in the trash stays there.
    op.drop_table("store_maintenance")
    op.drop_table("collect_candidates")
    for table in ("scrub_totals", "price_lists", "audit_events", "operations", "holds", "retention_marks", "policies"):
        op.drop_table(table)
    op.drop_table("workers")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_change_of_event()")
    op.execute("UPDATE copies SET state = 'suspect' WHERE state IN ('cold', 'thawing')")
    op.execute("UPDATE copies SET state = 'deleting', leased_until = NULL WHERE state = 'copying'")
    op.drop_index("ix_copies_leased", table_name="copies")
    op.drop_index("ix_shard_chunks_copy_id", table_name="shard_chunks")
    op.drop_index("ix_copies_damaged", table_name="copies")
    op.drop_index("ix_copies_locked", table_name="copies")
    op.drop_index("ix_copies_store_id_state_verified_at", table_name="copies")
    for name, _ in COPY_COLUMNS:
        op.drop_column("copies", name)
    op.drop_index("ix_checkpoints_to_forget", table_name="checkpoints")
    op.drop_index("ix_checkpoints_thawed", table_name="checkpoints")
    op.drop_index("ix_checkpoints_to_cool", table_name="checkpoints")
    op.drop_index("ix_checkpoints_to_record", table_name="checkpoints")
    op.drop_index("ix_checkpoints_trashed_purge", table_name="checkpoints")
    for name in (*(name for name, _ in CHECKPOINT_COLUMNS), "recorded_version"):
        op.drop_column("checkpoints", name)
    op.drop_column("tokens", "created_by_token")
    for name in (*(name for name, _ in CONTROLLER_COLUMNS), "done", "failed"):
        op.drop_column("controllers", name)
