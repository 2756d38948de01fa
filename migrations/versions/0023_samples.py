"""Hourly samples of projects and runs

Revision: 0023. They begin with the first hour that ends after the upgrade: what was before is not known.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document, Moment

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def _sampled() -> list[sa.Column]:
    return [
        sa.Column("hour", Moment, primary_key=True),
        sa.Column("taken_at", Moment, nullable=False),
        sa.Column("committed_checkpoints", sa.BigInteger(), nullable=False),
        sa.Column("logical_bytes", sa.BigInteger(), nullable=False),
        sa.Column("productive_seconds", sa.Float(), nullable=True),
        sa.Column("wall_seconds", sa.Float(), nullable=True),
        sa.Column("restore_point_age_seconds", sa.Float(), nullable=True),
    ]


def upgrade() -> None:
    op.create_table(
        "project_samples",
        sa.Column(
            "project_id",
            sa.Text(),
            sa.ForeignKey("projects.id", name="fk_project_samples_project_id"),
            primary_key=True,
        ),
        *_sampled(),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stores", Document, nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("per_month", sa.Float(), nullable=False),
        sa.Column("unpriced_bytes", sa.BigInteger(), nullable=False),
        sa.Column("live_runs", sa.Integer(), nullable=False),
        sa.Column("runs_without_restore_point", sa.Integer(), nullable=False),
    )
    op.create_table(
        "run_samples",
        sa.Column("run_id", sa.Text(), sa.ForeignKey("runs.id", name="fk_run_samples_run_id"), primary_key=True),
        *_sampled(),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("restore_point_step", sa.BigInteger(), nullable=True),
    )
    for table in ("project_samples", "run_samples"):
        op.create_index(f"ix_{table}_hour", table, ["hour"])
        if op.get_bind().dialect.name == "postgresql":
            # As 0016 has it for a table whose rows are written once, and whose old ones are deleted.
            op.execute(
                f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 10000, "
                "autovacuum_vacuum_insert_scale_factor = 0.01, autovacuum_vacuum_insert_threshold = 100000, "
                "autovacuum_analyze_scale_factor = 0.01, autovacuum_analyze_threshold = 10000, "
                "autovacuum_vacuum_cost_limit = 2000, autovacuum_freeze_min_age = 0)"
            )


def downgrade() -> None:
    op.drop_table("run_samples")
    op.drop_table("project_samples")
