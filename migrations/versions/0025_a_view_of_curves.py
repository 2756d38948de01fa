"""The view of metric curves, dashboard_v1_curve_points

Revision: 0025. No table changes: the views are made after the last revision, by `migrations/env.py`.
"""

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
