"""The catalog

Revision: 0011, the first that counts: those before it were never released. The same statements on SQLite and on
Postgres; `db/tables/` says what they mean. One file: a revision is applied as a whole, and its tables stand in the
order of their keys.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
# SQLite numbers rows by itself only in a column of exactly this type.
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

TABLES = (
    "audit_events",
    "catalog_identity",
    "collect_candidates",
    "controllers",
    "found_encodings",
    "history_marks",
    "price_lists",
    "projects",
    "rebuild_doubts",
    "stores",
    "workers",
    "chunk_lists",
    "chunks",
    "forgotten_totals",
    "policies",
    "record_subjects",
    "runs",
    "scrub_totals",
    "store_maintenance",
    "tokens",
    "webhooks",
    "written_records",
    "attempts",
    "chunk_list_entries",
    "retention_marks",
    "webhook_deliveries",
    "checkpoints",
    "copies",
    "checkpoint_copies",
    "holds",
    "operations",
    "read_leases",
    "shards",
    "shard_chunks",
)


def upgrade() -> None:
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
    _index("ix_audit_events_checkpoint_id", "audit_events", ["checkpoint_id", "id"])
    _index("ix_audit_events_project_id", "audit_events", ["project_id", "id"])
    op.create_table(
        "catalog_identity",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("catalog_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("signing_key", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("place", sa.Text(), nullable=True),
        sa.Column("rebuilding_from", sa.Text(), nullable=True),
        sa.Column("went_back", sa.Text(), nullable=True),
        sa.Column("went_back_epoch", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_catalog_identity"),
    )
    op.create_table(
        "collect_candidates",
        sa.Column("chunk_id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("due_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("chunk_id", name="pk_collect_candidates"),
    )
    _index("ix_collect_candidates_due_at", "collect_candidates", ["due_at"])
    op.create_table(
        "controllers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("reconciled_at", MOMENT, nullable=False),
        sa.Column("paused_at", MOMENT, nullable=True),
        sa.Column("paused_by", sa.Text(), nullable=True),
        sa.Column("pause_reason", sa.Text(), nullable=True),
        sa.Column("run_requested_at", MOMENT, nullable=True),
        sa.Column("run_answered_at", MOMENT, nullable=True),
        sa.Column("began_at", MOMENT, nullable=True),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("pass_seconds", sa.Float(), nullable=True),
        sa.Column("report", DOCUMENT, nullable=True),
        sa.Column("report_at", MOMENT, nullable=True),
        sa.Column("done", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("failed", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("error_at", MOMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_controllers"),
    )
    op.create_table(
        "found_encodings",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("stored_digest", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "digest", "stored_bytes", name="pk_found_encodings"),
    )
    op.create_table(
        "history_marks",
        sa.Column("memory_id", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("moved_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("memory_id", "slot", name="pk_history_marks"),
    )
    op.create_table(
        "price_lists",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_price_lists"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("quota_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("deleted_at", MOMENT, nullable=True),
        sa.Column("deleted_by", sa.Text(), nullable=True),
        sa.Column("delete_reason", sa.Text(), nullable=True),
        sa.Column("purge_at", MOMENT, nullable=True),
        sa.Column("purged_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("name", name="uq_projects_name"),
    )
    op.create_table(
        "rebuild_doubts",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("project", "run", name="pk_rebuild_doubts"),
    )
    op.create_table(
        "stores",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("capabilities", DOCUMENT, nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("checked_at", MOMENT, nullable=True),
        sa.Column("checked_epoch", sa.Integer(), nullable=True),
        sa.Column("checked_whole", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_stores"),
        sa.UniqueConstraint("url", name="uq_stores_url"),
    )
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
    op.create_table(
        "chunk_lists",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("entries_digest", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_chunk_lists_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_chunk_lists"),
        sa.UniqueConstraint("project_id", "entries_digest", name="uq_chunk_lists_project_id_entries_digest"),
    )
    op.create_table(
        "chunks",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("damages", sa.Integer(), nullable=False, server_default="0"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_chunks_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_chunks"),
        sa.UniqueConstraint("project_id", "digest", "bytes", name="uq_chunks_project_id_digest_bytes"),
    )
    op.create_table(
        "forgotten_totals",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("committed", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("aborted", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("chunk_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("uploaded_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("deduplicated_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_forgotten_totals_project_id"),
        sa.PrimaryKeyConstraint("project_id", name="pk_forgotten_totals"),
    )
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
    _index("ix_record_subjects_to_record", "record_subjects", ["subject_id"], where="recorded_version < version")
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("latest_attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("deleted_at", MOMENT, nullable=True),
        sa.Column("deleted_by", sa.Text(), nullable=True),
        sa.Column("delete_reason", sa.Text(), nullable=True),
        sa.Column("purge_at", MOMENT, nullable=True),
        sa.Column("purged_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_runs_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("project_id", "name", name="uq_runs_project_id_name"),
    )
    op.create_table(
        "scrub_totals",
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("read_copies", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("read_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("bad_copies", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("repaired_copies", sa.BigInteger(), nullable=False, server_default="0"),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_scrub_totals_store_id"),
        sa.PrimaryKeyConstraint("store_id", name="pk_scrub_totals"),
    )
    op.create_table(
        "store_maintenance",
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("scan_began_at", MOMENT, nullable=True),
        sa.Column("scanned_copy_id", sa.BigInteger(), nullable=True),
        sa.Column("swept_at", MOMENT, nullable=True),
        sa.Column("sweep", DOCUMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_store_maintenance_store_id"),
        sa.PrimaryKeyConstraint("store_id", name="pk_store_maintenance"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("scopes", DOCUMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by_token", sa.Text(), nullable=True),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_tokens_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("events", DOCUMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("deleted_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_webhooks_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    _index("ix_webhooks_project_id", "webhooks", ["project_id"])
    op.create_table(
        "written_records",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("removed_at", MOMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_written_records_store_id"),
        sa.PrimaryKeyConstraint("kind", "subject_id", "store_id", name="pk_written_records"),
    )
    _index("ix_written_records_store_id_kind", "written_records", ["store_id", "kind"])
    op.create_table(
        "attempts",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("launch_id", sa.Text(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("environment", DOCUMENT, nullable=False),
        sa.Column("opened_at", MOMENT, nullable=False),
        sa.Column("heartbeat_at", MOMENT, nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("first_step_at", MOMENT, nullable=True),
        sa.Column("steps_run", sa.BigInteger(), nullable=True),
        sa.Column("doing", sa.Text(), nullable=True),
        sa.Column("progressed_at", MOMENT, nullable=True),
        sa.Column("stalled_at", MOMENT, nullable=True),
        sa.Column("steps_per_second", sa.Float(), nullable=True),
        sa.Column("restore_seconds", sa.Float(), nullable=True),
        sa.Column("saves_begun", sa.Integer(), nullable=True),
        sa.Column("save_blocked_seconds", sa.Float(), nullable=True),
        sa.Column("error_type", sa.Text(), nullable=True),
        sa.Column("error_rank", sa.Integer(), nullable=True),
        sa.Column("notice", DOCUMENT, nullable=True),
        sa.Column("refused_at", MOMENT, nullable=True),
        sa.Column("excused_until", MOMENT, nullable=True),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("outcome_detail", sa.Text(), nullable=True),
        sa.Column("resumed_from_id", sa.Text(), nullable=True),
        sa.Column("offered_id", sa.Text(), nullable=True),
        sa.Column("rolled_back_at", MOMENT, nullable=True),
        sa.Column("cut_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("run_id", "launch_id", name="uq_attempts_run_id_launch_id"),
        sa.UniqueConstraint("run_id", "number", name="uq_attempts_run_id_number"),
    )
    _index("ix_attempts_open", "attempts", ["id"], where="ended_at IS NULL")
    _index(
        "ix_attempts_silent",
        "attempts",
        ["ended_at"],
        where="outcome = 'fenced' AND refused_at IS NULL AND rolled_back_at IS NULL",
    )
    op.create_table(
        "chunk_list_entries",
        sa.Column("chunk_list_id", ROW_ID, nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("chunk_id", ROW_ID, nullable=False),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_chunk_list_entries_chunk_id"),
        sa.ForeignKeyConstraint(["chunk_list_id"], ["chunk_lists.id"], name="fk_chunk_list_entries_chunk_list_id"),
        sa.PrimaryKeyConstraint("chunk_list_id", "ordinal", name="pk_chunk_list_entries"),
    )
    _index("ix_chunk_list_entries_chunk_id", "chunk_list_entries", ["chunk_id"])
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
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", DOCUMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", MOMENT, nullable=False),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("delivered_at", MOMENT, nullable=True),
        sa.Column("given_up_at", MOMENT, nullable=True),
        sa.Column("last_status", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_webhook_deliveries_webhook_id"),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_deliveries"),
        sa.UniqueConstraint("webhook_id", "event", "subject", name="uq_webhook_deliveries_webhook_id_event_subject"),
    )
    _index("ix_webhook_deliveries_created_at", "webhook_deliveries", ["created_at"])
    _index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_try_at"],
        where="delivered_at IS NULL AND given_up_at IS NULL",
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("attempt_number", sa.Integer(), nullable=False),
        sa.Column("pushed_by", sa.Integer(), nullable=True),
        sa.Column("detached", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("health", sa.Text(), nullable=False),
        sa.Column("health_reason", sa.Text(), nullable=True),
        sa.Column("lost_chunk_id", sa.BigInteger(), nullable=True),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("logical_bytes", sa.BigInteger(), nullable=False),
        sa.Column("chunk_bytes", sa.BigInteger(), nullable=False),
        sa.Column("uploaded_bytes", sa.BigInteger(), nullable=False),
        sa.Column("deduplicated_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("metrics", DOCUMENT, nullable=False),
        sa.Column("labels", DOCUMENT, nullable=False),
        sa.Column("components", DOCUMENT, nullable=False),
        sa.Column("missing_components", DOCUMENT, nullable=True),
        sa.Column("blocked_seconds", sa.Float(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("deadline_at", MOMENT, nullable=False),
        sa.Column("committed_at", MOMENT, nullable=True),
        sa.Column("aborted_at", MOMENT, nullable=True),
        sa.Column("abort_reason", sa.Text(), nullable=True),
        sa.Column("abort_rank", sa.Integer(), nullable=True),
        sa.Column("abort_cause", sa.Text(), nullable=True),
        sa.Column("pinned_at", MOMENT, nullable=True),
        sa.Column("pinned_by", sa.Text(), nullable=True),
        sa.Column("pin_reason", sa.Text(), nullable=True),
        sa.Column("pinned_until", MOMENT, nullable=True),
        sa.Column("trashed_at", MOMENT, nullable=True),
        sa.Column("trashed_by", sa.Text(), nullable=True),
        sa.Column("trash_reason", sa.Text(), nullable=True),
        sa.Column("purge_at", MOMENT, nullable=True),
        sa.Column("deleted_at", MOMENT, nullable=True),
        sa.Column("thaw_requested_at", MOMENT, nullable=True),
        sa.Column("thaw_expected_at", MOMENT, nullable=True),
        sa.Column("thawed_until", MOMENT, nullable=True),
        sa.Column("thaw_speed", sa.Text(), nullable=True),
        sa.Column("thaw_days", sa.Integer(), nullable=True),
        sa.Column("tier_wanted", sa.Text(), nullable=True),
        sa.Column("tier_checked_at", MOMENT, nullable=True),
        sa.Column("cold_class", sa.Text(), nullable=True),
        sa.Column("readable_until", MOMENT, nullable=True),
        sa.Column("recorded_version", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("forgotten_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_checkpoints_attempt_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_checkpoints_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
    )
    _index("ix_checkpoints_corrupt", "checkpoints", ["id"], where="health = 'corrupt'")
    _index("ix_checkpoints_forgotten", "checkpoints", ["forgotten_at"], where="forgotten_at IS NOT NULL")
    _index("ix_checkpoints_run_id_step", "checkpoints", ["run_id", "step", "id"])
    _index("ix_checkpoints_thawed", "checkpoints", ["id"], where="thawed_until IS NOT NULL")
    _index(
        "ix_checkpoints_to_cool",
        "checkpoints",
        ["tier_checked_at", "id"],
        where="tier_wanted IS NOT NULL AND state = 'committed'",
    )
    _index(
        "ix_checkpoints_to_forget",
        "checkpoints",
        ["id"],
        where="state IN ('aborted', 'deleted') AND forgotten_at IS NULL",
    )
    _index(
        "ix_checkpoints_to_record",
        "checkpoints",
        ["id"],
        where="recorded_version < version AND state IN ('committed', 'trashed')",
    )
    _index("ix_checkpoints_trashed_purge", "checkpoints", ["purge_at"], where="state = 'trashed'")
    _index("ix_checkpoints_uploading_deadline", "checkpoints", ["deadline_at"], where="state = 'uploading'")
    _index(
        "uq_checkpoints_live_step",
        "checkpoints",
        ["run_id", "attempt_number", "step", "detached"],
        where="state IN ('uploading', 'committed')",
        unique=True,
    )
    op.create_table(
        "copies",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("chunk_id", ROW_ID, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("store_id", ROW_ID, nullable=False),
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("generation", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("proof", sa.Text(), nullable=True),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("stored_digest", sa.Text(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("version_id", sa.Text(), nullable=True),
        sa.Column("ticket_expires_at", MOMENT, nullable=False),
        sa.Column("overwritable_until", MOMENT, nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("verified_at", MOMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("storage_class", sa.Text(), nullable=True),
        sa.Column("thaw_requested_at", MOMENT, nullable=True),
        sa.Column("readable_until", MOMENT, nullable=True),
        sa.Column("lock", sa.Text(), nullable=True),
        sa.Column("bad_at", MOMENT, nullable=True),
        sa.Column("finding", sa.Text(), nullable=True),
        sa.Column("repaired_at", MOMENT, nullable=True),
        sa.Column("damage", sa.Integer(), nullable=True),
        sa.Column("read_after", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("looks", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("look_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_copies_attempt_id"),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_copies_chunk_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_copies_project_id"),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_copies_store_id"),
        sa.PrimaryKeyConstraint("id", name="pk_copies"),
        sa.UniqueConstraint("chunk_id", "store_id", "generation", name="uq_copies_chunk_id_store_id_generation"),
    )
    _index("ix_copies_chunk_id", "copies", ["chunk_id"])
    _index("ix_copies_damaged", "copies", ["id"], where="state = 'bad' AND bad_at IS NOT NULL AND repaired_at IS NULL")
    _index("ix_copies_leased", "copies", ["leased_until"], where="leased_until IS NOT NULL")
    _index("ix_copies_locked", "copies", ["id"], where="lock IS NOT NULL")
    _index("ix_copies_project_id_state", "copies", ["project_id", "state"])
    _index("ix_copies_store_id_state_verified_at", "copies", ["store_id", "state", "verified_at"])
    _index(
        "ix_copies_to_read",
        "copies",
        ["id"],
        where="state = 'suspect' OR (state = 'verified' AND proof IN ('unproven', 'read_early'))",
    )
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
    _index(
        "ix_checkpoint_copies_to_copy",
        "checkpoint_copies",
        ["store_id", "checkpoint_id"],
        where="wanted AND complete_at IS NULL",
    )
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
    _index("ix_holds_checkpoint_id", "holds", ["checkpoint_id"])
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
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_operations_checkpoint_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_operations_project_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_operations_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
    )
    _index("ix_operations_project_id", "operations", ["project_id", "created_at"])
    _index("ix_operations_state", "operations", ["state", "created_at"])
    _index(
        "uq_operations_open_fingerprint",
        "operations",
        ["fingerprint"],
        where="ended_at IS NULL AND cancel_requested_at IS NULL",
        unique=True,
    )
    op.create_table(
        "read_leases",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_read_leases_checkpoint_id"),
        sa.PrimaryKeyConstraint("id", name="pk_read_leases"),
    )
    _index("ix_read_leases_checkpoint_id", "read_leases", ["checkpoint_id"])
    op.create_table(
        "shards",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("chunk_list_id", ROW_ID, nullable=True),
        sa.Column("index_ordinal", sa.Integer(), nullable=True),
        sa.Column("layout_ordinal", sa.Integer(), nullable=True),
        sa.Column("logical_bytes", sa.BigInteger(), nullable=False),
        sa.Column("uploaded_bytes", sa.BigInteger(), nullable=False),
        sa.Column("deduplicated_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("components", DOCUMENT, nullable=False),
        sa.Column("metrics", DOCUMENT, nullable=True),
        sa.Column("finite", sa.Boolean(), nullable=False),
        sa.Column("verdict", DOCUMENT, nullable=True),
        sa.Column("dropped_components", DOCUMENT, nullable=True),
        sa.Column("blocked_seconds", sa.Float(), nullable=True),
        sa.Column("upload_seconds", sa.Float(), nullable=True),
        sa.Column("sealed_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_shards_checkpoint_id"),
        sa.ForeignKeyConstraint(["chunk_list_id"], ["chunk_lists.id"], name="fk_shards_chunk_list_id"),
        sa.PrimaryKeyConstraint("id", name="pk_shards"),
        sa.UniqueConstraint("checkpoint_id", "rank", name="uq_shards_checkpoint_id_rank"),
    )
    _index("ix_shards_chunk_list_id", "shards", ["chunk_list_id"])
    op.create_table(
        "shard_chunks",
        sa.Column("shard_id", ROW_ID, nullable=False),
        sa.Column("chunk_id", ROW_ID, nullable=False),
        sa.Column("copy_id", ROW_ID, nullable=False),
        sa.Column("uploading", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_shard_chunks_chunk_id"),
        sa.ForeignKeyConstraint(["copy_id"], ["copies.id"], name="fk_shard_chunks_copy_id"),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name="fk_shard_chunks_shard_id"),
        sa.PrimaryKeyConstraint("shard_id", "chunk_id", name="pk_shard_chunks"),
    )
    _index("ix_shard_chunks_chunk_id", "shard_chunks", ["chunk_id"])
    _index("ix_shard_chunks_copy_id", "shard_chunks", ["copy_id"])
    _append_only()


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_change_of_event()")


def _index(name: str, table: str, columns: Sequence[str], *, where: str | None = None, unique: bool = False) -> None:
    """With `where` over a part of the rows; the two databases take it under two names."""
    part = None if where is None else sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=part, postgresql_where=part)


def _append_only() -> None:
    """The database itself refuses to change an audit event."""
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
