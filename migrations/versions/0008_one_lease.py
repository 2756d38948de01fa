"""Every lease has the same two columns.

Revision: 0008, after 0007.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """A sweep's lease is named as all others are, and a record's has a token."""
    with op.batch_alter_table("store_maintenance") as maintenance:
        maintenance.alter_column("sweep_leased_until", new_column_name="leased_until")
        maintenance.alter_column("sweep_token", new_column_name="lease_token")
    with op.batch_alter_table("written_records") as written:
        written.add_column(sa.Column("lease_token", sa.Text(), nullable=True))


def downgrade() -> None:
    """The sweep's lease gets its own names back."""
    with op.batch_alter_table("written_records") as written:
        written.drop_column("lease_token")
    with op.batch_alter_table("store_maintenance") as maintenance:
        maintenance.alter_column("leased_until", new_column_name="sweep_leased_until")
        maintenance.alter_column("lease_token", new_column_name="sweep_token")
