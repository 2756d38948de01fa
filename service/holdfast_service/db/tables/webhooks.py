"""Whom a project wants to be called when something happens to its runs, and the calls that are due."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, Integer, LargeBinary, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Document, Moment, RowId, partial_index
from holdfast_service.db.lease import Leased
from holdfast_service.db.tables.core import Table

# A query that says exactly this can use the partial index.
TO_DELIVER = "delivered_at IS NULL AND given_up_at IS NULL"


class Webhook(Table):
    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    # Both as `secrets/kept.py` keeps them: plain, or encrypted with the key of this id.
    url: Mapped[str] = mapped_column(Text)
    # What proves a call to its receiver: signs it, or PagerDuty's routing key. Empty after deletion.
    secret: Mapped[bytes] = mapped_column(LargeBinary)
    encrypted_with: Mapped[str | None] = mapped_column(Text)
    format: Mapped[str] = mapped_column(Text, default="standard", server_default="standard")
    events: Mapped[list[str]] = mapped_column(Document)
    created_at: Mapped[datetime] = mapped_column(Moment)
    created_by: Mapped[str] = mapped_column(Text)
    deleted_at: Mapped[datetime | None] = mapped_column(Moment)


class WebhookDelivery(Leased, Table):
    """One call of one webhook. What happened once is told once: `subject` names what it happened to."""

    __tablename__ = "webhook_deliveries"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id"))
    event: Mapped[str] = mapped_column(Text)
    subject: Mapped[str] = mapped_column(Text)
    body: Mapped[dict[str, Any]] = mapped_column(Document)
    created_at: Mapped[datetime] = mapped_column(Moment)
    tries: Mapped[int] = mapped_column(Integer)
    next_try_at: Mapped[datetime] = mapped_column(Moment)
    delivered_at: Mapped[datetime | None] = mapped_column(Moment)
    given_up_at: Mapped[datetime | None] = mapped_column(Moment)
    last_status: Mapped[int | None] = mapped_column(Integer)
    last_error: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (
        UniqueConstraint("webhook_id", "event", "subject", name="uq_webhook_deliveries_webhook_id_event_subject"),
        partial_index("ix_webhook_deliveries_due", "next_try_at", where=TO_DELIVER),
        Index("ix_webhook_deliveries_created_at", "created_at"),
    )
