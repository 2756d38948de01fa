"""Which key the signing key and the secrets of a webhook are encrypted with

Revision: 0030. They are plain until a service starts that has a key. The columns are nullable and without a default:
no row is written, and no lock lasts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_TABLES = ("catalog_identity", "webhooks")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("encrypted_with", sa.Text(), nullable=True))


def downgrade() -> None:
    for table in _TABLES:
        if op.get_bind().scalar(sa.text(f"SELECT count(*) FROM {table} WHERE encrypted_with IS NOT NULL")):  # noqa: S608
            raise RuntimeError(f"{table} has encrypted secrets, which the revision before cannot open")
        op.drop_column(table, "encrypted_with")
