"""Lists of all runs: the newest runs of all projects, and checkpoints that are not well or in the trash

Revision: 0026.
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_OF_CHECKPOINTS = {
    "ix_checkpoints_unwell": "health <> 'ok'",
    "ix_checkpoints_in_trash": "state IN ('trashed', 'deleting')",
}


def upgrade() -> None:
    op.create_index("ix_runs_created_at", "runs", ["created_at", "id"])
    for name, where in _OF_CHECKPOINTS.items():
        op.create_index(
            name,
            "checkpoints",
            ["run_id", "step", "id"],
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )


def downgrade() -> None:
    for name in _OF_CHECKPOINTS:
        op.drop_index(name, "checkpoints")
    op.drop_index("ix_runs_created_at", "runs")
