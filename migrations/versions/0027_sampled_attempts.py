"""What the open attempt of a sampled run had made of its life until then; a run's ETag needs no count of edits

Revision: 0027. The first sample after the upgrade spreads what an attempt told evenly over its life, as all before did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run_samples", sa.Column("attempt", sa.Integer(), nullable=True))
    op.add_column("run_samples", sa.Column("attempt_productive_seconds", sa.Float(), nullable=True))
    op.drop_column("runs", "edits")


def downgrade() -> None:
    op.add_column("runs", sa.Column("edits", sa.Integer(), nullable=False, server_default="0"))
    op.drop_column("run_samples", "attempt_productive_seconds")
    op.drop_column("run_samples", "attempt")
