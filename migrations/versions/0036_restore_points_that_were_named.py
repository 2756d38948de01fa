"""The view of restore points has a detached checkpoint once an attempt has gone on from it

Revision: 0036. No table changes: the views are made after the last revision, by `migrations/env.py`.
"""

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
