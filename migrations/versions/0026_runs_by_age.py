"""The runs of all projects, the newest first

Revision: 0026.
"""

from alembic import op

revision = "0026"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_runs_created_at", "runs", ["created_at", "id"])


def downgrade() -> None:
    op.drop_index("ix_runs_created_at", "runs")
