"""What has happened to runs and checkpoints, and its order."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Index, Integer, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Moment, RowId, partial_index
from holdfast_service.db.tables.core import Table

# A query that says exactly this can use the partial index.
UNNUMBERED = "number IS NULL"


class EventRow(Table):
    """One event. `number` is its position in the stream, given after it was committed: an `id` can become visible after
    a greater one. What happened once is told once: `subject` names what it happened to, null where that is sure."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    number: Mapped[int | None] = mapped_column(BigInteger)
    type: Mapped[str] = mapped_column(Text)
    subject: Mapped[str | None] = mapped_column(Text)
    happened_at: Mapped[datetime] = mapped_column(Moment)
    # No foreign keys: an event outlives what it speaks of.
    project_id: Mapped[str | None] = mapped_column(Text)  # null: it concerns all of them
    run_id: Mapped[str | None] = mapped_column(Text)
    attempt: Mapped[int | None] = mapped_column(Integer)
    step: Mapped[int | None] = mapped_column(BigInteger)
    checkpoint_id: Mapped[str | None] = mapped_column(Text)
    operation: Mapped[str | None] = mapped_column(Text)
    store: Mapped[str | None] = mapped_column(Text)  # its role
    quota: Mapped[str | None] = mapped_column(Text)  # what it counts
    reason: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (
        UniqueConstraint("number", name="uq_events_number"),
        UniqueConstraint("project_id", "type", "subject", name="uq_events_project_id_type_subject"),
        partial_index("ix_events_unnumbered", "id", where=UNNUMBERED),
        Index("ix_events_project_id", "project_id", "number"),
        Index("ix_events_run_id", "run_id", "number"),
        Index("ix_events_happened_at", "happened_at"),
    )


class EventNumbering(Table):
    """One row. `last` is the greatest number that was given, `forgotten` the greatest one whose event has gone."""

    __tablename__ = "event_numbering"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    last: Mapped[int] = mapped_column(BigInteger)
    forgotten: Mapped[int] = mapped_column(BigInteger)
