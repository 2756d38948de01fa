"""Whose identity a token was made for, and the identities' tokens that were used up

Revision: 0033. The columns are nullable: no row is written, and no lock lasts.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Moment

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("issuer", sa.Text(), nullable=True))
    op.add_column("tokens", sa.Column("subject", sa.Text(), nullable=True))
    op.create_table(
        "used_identity_tokens",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("expires_at", Moment, nullable=False),
    )
    op.create_index("ix_used_identity_tokens_expires_at", "used_identity_tokens", ["expires_at"])


def downgrade() -> None:
    op.drop_table("used_identity_tokens")
    op.drop_column("tokens", "subject")
    op.drop_column("tokens", "issuer")
