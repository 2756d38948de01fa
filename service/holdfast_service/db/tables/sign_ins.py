"""What stands for a token for a while: the sessions of the web page, and the codes that open one."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Digest, Moment
from holdfast_service.db.tables.core import Table


class SignIn(Table):
    """The row is deleted with its token's."""

    __tablename__ = "sign_ins"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)  # session, code
    token_id: Mapped[str] = mapped_column(ForeignKey("tokens.id", ondelete="CASCADE"), index=True)
    secret_sha256: Mapped[str] = mapped_column(Digest)
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment, index=True)
