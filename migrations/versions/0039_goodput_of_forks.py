"""The views of goodput begin with the first launch of a fork, and no view by day has days to come

Revision: 0039. No table changes: the views are made after the last revision, by `migrations/env.py`.
"""

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
