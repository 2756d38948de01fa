"""Late saves: who pushed a checkpoint from a spool, and whether the run had gone on without it

Revision: 0003, after 0002. A branch that is detached stands beside the step that is on it, so the identity of what
is live tells them apart.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

LIVE = sa.text("state IN ('uploading', 'committed')")


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("pushed_by", sa.Integer(), nullable=True))
    op.add_column("checkpoints", sa.Column("detached", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.drop_index("uq_checkpoints_live_step", table_name="checkpoints")
    _live_step_index("run_id", "attempt_number", "step", "detached")


def downgrade() -> None:
    # The version before knows no branches: it would take them for steps of the line.
    op.execute(
        "UPDATE checkpoints SET state = 'aborted', aborted_at = CURRENT_TIMESTAMP, version = version + 1, "
        "abort_reason = 'the catalog went back to a version without late saves' WHERE detached AND state = 'uploading'"
    )
    op.execute("UPDATE checkpoints SET state = 'trashed', version = version + 1 WHERE detached AND state = 'committed'")
    op.drop_index("uq_checkpoints_live_step", table_name="checkpoints")
    op.drop_column("checkpoints", "detached")
    op.drop_column("checkpoints", "pushed_by")
    _live_step_index("run_id", "attempt_number", "step")


def _live_step_index(*columns: str) -> None:
    op.create_index(
        "uq_checkpoints_live_step",
        "checkpoints",
        list(columns),
        unique=True,
        sqlite_where=LIVE,
        postgresql_where=LIVE,
    )
