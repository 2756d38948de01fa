"""Tokens of other issuers that must not be taken a second time."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Moment
from holdfast_service.db.tables.core import Table


class UsedIdentityToken(Table):
    """`id`: a hash of its issuer and its `jti`, or of what its issuer has signed. The row goes once it has expired."""

    __tablename__ = "used_identity_tokens"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    expires_at: Mapped[datetime] = mapped_column(Moment, index=True)
