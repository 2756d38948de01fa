"""The catalog

Revision: 0001, the first. The same statements on SQLite and on Postgres; `db/tables/core.py` says what they mean.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
# SQLite numbers rows by itself only in a column of exactly this type.
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "catalog_identity",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("catalog_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("signing_key", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_catalog_identity"),
    )
    op.create_table(
        "controllers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("reconciled_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_controllers"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("quota_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("name", name="uq_projects_name"),
    )
    op.create_table(
        "stores",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("capabilities", DOCUMENT, nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stores"),
        sa.UniqueConstraint("url", name="uq_stores_url"),
    )
    op.create_table(
        "chunk_lists",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_chunk_lists_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_chunk_lists"),
        sa.UniqueConstraint("project_id", "digest", name="uq_chunk_lists_project_id_digest"),
    )
    op.create_table(
        "chunks",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_chunks_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_chunks"),
        sa.UniqueConstraint("project_id", "digest", name="uq_chunks_project_id_digest"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("latest_attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_runs_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("project_id", "name", name="uq_runs_project_id_name"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("scopes", DOCUMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_tokens_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
    )
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
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("outcome_detail", sa.Text(), nullable=True),
        sa.Column("resumed_from_id", sa.Text(), nullable=True),
        sa.Column("cut_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("run_id", "launch_id", name="uq_attempts_run_id_launch_id"),
        sa.UniqueConstraint("run_id", "number", name="uq_attempts_run_id_number"),
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
    op.create_index("ix_chunk_list_entries_chunk_id", "chunk_list_entries", ["chunk_id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("attempt_number", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("health", sa.Text(), nullable=False),
        sa.Column("health_reason", sa.Text(), nullable=True),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("logical_bytes", sa.BigInteger(), nullable=False),
        sa.Column("chunk_bytes", sa.BigInteger(), nullable=False),
        sa.Column("uploaded_bytes", sa.BigInteger(), nullable=False),
        sa.Column("metrics", DOCUMENT, nullable=False),
        sa.Column("labels", DOCUMENT, nullable=False),
        sa.Column("components", DOCUMENT, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("deadline_at", MOMENT, nullable=False),
        sa.Column("committed_at", MOMENT, nullable=True),
        sa.Column("aborted_at", MOMENT, nullable=True),
        sa.Column("abort_reason", sa.Text(), nullable=True),
        sa.Column("abort_rank", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_checkpoints_attempt_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_checkpoints_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
    )
    op.create_index(
        "ix_checkpoints_corrupt",
        "checkpoints",
        ["id"],
        unique=False,
        sqlite_where=sa.text("health = 'corrupt'"),
        postgresql_where=sa.text("health = 'corrupt'"),
    )
    op.create_index("ix_checkpoints_run_id_step", "checkpoints", ["run_id", "step", "id"], unique=False)
    op.create_index(
        "ix_checkpoints_uploading_deadline",
        "checkpoints",
        ["deadline_at"],
        unique=False,
        sqlite_where=sa.text("state = 'uploading'"),
        postgresql_where=sa.text("state = 'uploading'"),
    )
    op.create_index(
        "uq_checkpoints_live_step",
        "checkpoints",
        ["run_id", "attempt_number", "step"],
        unique=True,
        sqlite_where=sa.text("state IN ('uploading', 'committed')"),
        postgresql_where=sa.text("state IN ('uploading', 'committed')"),
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
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("verified_at", MOMENT, nullable=True),
        sa.Column("leased_until", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_copies_attempt_id"),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_copies_chunk_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_copies_project_id"),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name="fk_copies_store_id"),
        sa.PrimaryKeyConstraint("id", name="pk_copies"),
        sa.UniqueConstraint("chunk_id", "store_id", "generation", name="uq_copies_chunk_id_store_id_generation"),
    )
    op.create_index("ix_copies_chunk_id", "copies", ["chunk_id"], unique=False)
    op.create_index("ix_copies_project_id_state", "copies", ["project_id", "state"], unique=False)
    op.create_index(
        "ix_copies_to_read",
        "copies",
        ["id"],
        unique=False,
        sqlite_where=sa.text("state = 'suspect' OR (state = 'verified' AND proof = 'unproven')"),
        postgresql_where=sa.text("state = 'suspect' OR (state = 'verified' AND proof = 'unproven')"),
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
    op.create_index("ix_read_leases_checkpoint_id", "read_leases", ["checkpoint_id"], unique=False)
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
        sa.Column("components", DOCUMENT, nullable=False),
        sa.Column("metrics", DOCUMENT, nullable=True),
        sa.Column("finite", sa.Boolean(), nullable=False),
        sa.Column("sealed_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_shards_checkpoint_id"),
        sa.ForeignKeyConstraint(["chunk_list_id"], ["chunk_lists.id"], name="fk_shards_chunk_list_id"),
        sa.PrimaryKeyConstraint("id", name="pk_shards"),
        sa.UniqueConstraint("checkpoint_id", "rank", name="uq_shards_checkpoint_id_rank"),
    )
    op.create_index("ix_shards_chunk_list_id", "shards", ["chunk_list_id"], unique=False)
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
    op.create_index("ix_shard_chunks_chunk_id", "shard_chunks", ["chunk_id"], unique=False)


def downgrade() -> None:
    op.drop_table("shard_chunks")
    op.drop_table("shards")
    op.drop_table("read_leases")
    op.drop_table("copies")
    op.drop_table("checkpoints")
    op.drop_table("chunk_list_entries")
    op.drop_table("attempts")
    op.drop_table("tokens")
    op.drop_table("runs")
    op.drop_table("chunks")
    op.drop_table("chunk_lists")
    op.drop_table("stores")
    op.drop_table("projects")
    op.drop_table("controllers")
    op.drop_table("catalog_identity")
