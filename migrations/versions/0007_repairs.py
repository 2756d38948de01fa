"""Repairs: what the promises needed after a hard trial. One function for each subject, called from `upgrade`.

Revision: 0007, after 0006.
"""

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What each subject adds."""


def downgrade() -> None:
    """What each subject added, taken away in the opposite order."""
