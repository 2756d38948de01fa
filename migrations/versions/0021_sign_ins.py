"""Sessions of the web page, and the codes that open one

Revision: 0021.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db.dialect import Digest, Moment

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sign_ins",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "token_id",
            sa.Text(),
            sa.ForeignKey("tokens.id", name="fk_sign_ins_token_id_tokens", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("secret_sha256", Digest, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
    )
    op.create_index("ix_sign_ins_token_id", "sign_ins", ["token_id"])
    op.create_index("ix_sign_ins_expires_at", "sign_ins", ["expires_at"])


def downgrade() -> None:
    op.drop_table("sign_ins")
