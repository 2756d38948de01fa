"""Survival: what an attempt says of itself while it lives and how it ended, what a save cost, webhooks

Revision: 0006, after 0005. Nothing of what is there changes: older attempts just do not know these facts.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TO_DELIVER = sa.text("delivered_at IS NULL AND given_up_at IS NULL")
OPEN = sa.text("ended_at IS NULL")
SILENT = sa.text("outcome = 'fenced' AND refused_at IS NULL AND rolled_back_at IS NULL")

ATTEMPT_COLUMNS = (
    ("first_step", sa.BigInteger()),
    ("first_step_at", MOMENT),
    ("steps_run", sa.BigInteger()),
    ("doing", sa.Text()),
    ("progressed_at", MOMENT),
    ("stalled_at", MOMENT),
    ("steps_per_second", sa.Float()),
    ("restore_seconds", sa.Float()),
    ("saves_begun", sa.Integer()),
    ("save_blocked_seconds", sa.Float()),
    ("error_type", sa.Text()),
    ("error_rank", sa.Integer()),
    ("notice", DOCUMENT),
    ("refused_at", MOMENT),
    ("excused_until", MOMENT),
    ("offered_id", sa.Text()),
    ("rolled_back_at", MOMENT),
)
SHARD_COLUMNS = (
    ("verdict", DOCUMENT),
    ("dropped_components", DOCUMENT),
)
CHECKPOINT_COLUMNS = (
    ("blocked_seconds", sa.Float()),
    ("missing_components", DOCUMENT),
)


def upgrade() -> None:
    for name, kind in ATTEMPT_COLUMNS:
        op.add_column("attempts", sa.Column(name, kind, nullable=True))
    op.create_index("ix_attempts_open", "attempts", ["id"], sqlite_where=OPEN, postgresql_where=OPEN)
    op.create_index("ix_attempts_silent", "attempts", ["ended_at"], sqlite_where=SILENT, postgresql_where=SILENT)
    for name, kind in CHECKPOINT_COLUMNS:
        op.add_column("checkpoints", sa.Column(name, kind, nullable=True))
    for name, kind in SHARD_COLUMNS:
        op.add_column("shards", sa.Column(name, kind, nullable=True))
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
    op.create_index("ix_webhooks_project_id", "webhooks", ["project_id"])
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
        sa.Column("delivered_at", MOMENT, nullable=True),
        sa.Column("given_up_at", MOMENT, nullable=True),
        sa.Column("last_status", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_webhook_deliveries_webhook_id"),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_deliveries"),
        sa.UniqueConstraint("webhook_id", "event", "subject", name="uq_webhook_deliveries_webhook_id_event_subject"),
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_try_at"],
        sqlite_where=TO_DELIVER,
        postgresql_where=TO_DELIVER,
    )
    op.create_index("ix_webhook_deliveries_created_at", "webhook_deliveries", ["created_at"])


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
    for name, _ in SHARD_COLUMNS:
        op.drop_column("shards", name)
    for name, _ in CHECKPOINT_COLUMNS:
        op.drop_column("checkpoints", name)
    op.drop_index("ix_attempts_silent", table_name="attempts")
    op.drop_index("ix_attempts_open", table_name="attempts")
    for name, _ in ATTEMPT_COLUMNS:
        op.drop_column("attempts", name)
