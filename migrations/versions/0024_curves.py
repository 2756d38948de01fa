"""The metric curves of runs, and their tags and notes

Revision: 0024. Runs that are there have no curve, no tags and an empty note.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Document, RowId

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

# They are deleted as a curve is thinned, a half of them at once.
_POINTS = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 10000,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_vacuum_insert_threshold": 100000,
    "autovacuum_analyze_scale_factor": 0.02,
    "autovacuum_analyze_threshold": 10000,
}


def upgrade() -> None:
    op.create_table(
        "curves",
        sa.Column("id", RowId, primary_key=True),
        sa.Column("run_id", sa.Text(), sa.ForeignKey("runs.id", name="fk_curves_run_id_runs"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("points", sa.Integer(), nullable=False),
        sa.UniqueConstraint("run_id", "name", name="uq_curves_run_id_name"),
    )
    op.create_table(
        "curve_points",
        sa.Column(
            "curve_id",
            RowId,
            sa.ForeignKey("curves.id", name="fk_curve_points_curve_id_curves", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("nonfinite", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("curve_id", "attempt", "step", name="pk_curve_points"),
    )
    op.add_column("runs", sa.Column("tags", Document, nullable=False, server_default="[]"))
    op.add_column("runs", sa.Column("note", sa.Text(), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("edits", sa.Integer(), nullable=False, server_default="0"))
    if op.get_bind().dialect.name == "postgresql":
        options = ", ".join(f"{name} = {value}" for name, value in _POINTS.items())
        op.execute(f"ALTER TABLE curve_points SET ({options})")


def downgrade() -> None:
    op.drop_column("runs", "edits")
    op.drop_column("runs", "note")
    op.drop_column("runs", "tags")
    op.drop_table("curve_points")
    op.drop_table("curves")
