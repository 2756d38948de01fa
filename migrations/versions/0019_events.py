"""Events, for those who list and follow them

Revision: 0019. What happened before is not told.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document, Moment, RowId

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("number", sa.BigInteger()),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text()),
        sa.Column("happened_at", Moment, nullable=False),
        sa.Column("project_id", sa.Text()),
        sa.Column("run_id", sa.Text()),
        sa.Column("attempt", sa.Integer()),
        sa.Column("step", sa.BigInteger()),
        sa.Column("checkpoint_id", sa.Text()),
        sa.Column("operation", sa.Text()),
        sa.Column("store", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.UniqueConstraint("number", name="uq_events_number"),
        sa.UniqueConstraint("project_id", "type", "subject", name="uq_events_project_id_type_subject"),
    )
    unnumbered = sa.text("number IS NULL")
    op.create_index("ix_events_unnumbered", "events", ["id"], sqlite_where=unnumbered, postgresql_where=unnumbered)
    op.create_index("ix_events_project_id", "events", ["project_id", "number"])
    op.create_index("ix_events_run_id", "events", ["run_id", "number"])
    op.create_index("ix_events_happened_at", "events", ["happened_at"])
    op.create_table(
        "event_numbering",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("forgotten", sa.BigInteger(), nullable=False),
    )
    op.add_column("stores", sa.Column("unavailable_as", sa.Text()))
    op.add_column("workers", sa.Column("unavailable", Document, server_default="{}", nullable=False))
    if op.get_bind().dialect.name == "postgresql":
        # As 0016 has it for tables that only grow, and for rows that are updated again and again.
        op.execute(
            "ALTER TABLE events SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 10000, "
            "autovacuum_vacuum_insert_scale_factor = 0.01, autovacuum_vacuum_insert_threshold = 100000, "
            "autovacuum_analyze_scale_factor = 0.01, autovacuum_analyze_threshold = 10000, "
            "autovacuum_vacuum_cost_limit = 2000)"
        )
        op.execute(
            "ALTER TABLE event_numbering SET (autovacuum_vacuum_scale_factor = 0.02, "
            "autovacuum_vacuum_threshold = 500, autovacuum_analyze_scale_factor = 0.05, "
            "autovacuum_analyze_threshold = 500, autovacuum_vacuum_cost_delay = 0)"
        )


def downgrade() -> None:
    op.drop_column("workers", "unavailable")
    op.drop_column("stores", "unavailable_as")
    op.drop_table("event_numbering")
    op.drop_table("events")
