"""Why a checkpoint was aborted, in a form for programs

Revision: 0002. Null for what was aborted before: nobody waits for those any more.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("abort_cause", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "abort_cause")
