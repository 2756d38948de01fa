"""What projects and live runs were at the end of an hour. Nothing else in the catalog tells it afterwards."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Float, ForeignKey, Integer, Text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Document, Moment
from holdfast_service.db.tables.core import Table


class Sampled:
    """`hour` is the begin of the hour, in UTC, and `taken_at` a moment after its end: until then the sums are. The
    seconds are those of the hour itself; null while no step's time is known."""

    hour: Mapped[datetime] = mapped_column(Moment, primary_key=True, index=True)
    taken_at: Mapped[datetime] = mapped_column(Moment)
    committed_checkpoints: Mapped[int] = mapped_column(BigInteger)
    logical_bytes: Mapped[int] = mapped_column(BigInteger)
    productive_seconds: Mapped[float | None] = mapped_column(Float)
    wall_seconds: Mapped[float | None] = mapped_column(Float)
    restore_point_age_seconds: Mapped[float | None] = mapped_column(Float)


class ProjectSampleRow(Sampled, Table):
    """`stores`: the stored bytes by the role of their store. `restore_point_age_seconds`: the greatest of its live
    runs."""

    __tablename__ = "project_samples"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True, sort_order=-1)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
    stores: Mapped[dict[str, Any]] = mapped_column(Document)
    currency: Mapped[str] = mapped_column(Text)
    per_month: Mapped[float] = mapped_column(Float)
    unpriced_bytes: Mapped[int] = mapped_column(BigInteger)
    live_runs: Mapped[int] = mapped_column(Integer)
    runs_without_restore_point: Mapped[int] = mapped_column(Integer)  # of these


class RunSampleRow(Sampled, Table):
    """`attempt_productive_seconds`: what the open attempt `attempt` had of all its life, for the next sample."""

    __tablename__ = "run_samples"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, sort_order=-1)
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    restore_point_step: Mapped[int | None] = mapped_column(BigInteger)
    attempt: Mapped[int | None] = mapped_column(Integer)
    attempt_productive_seconds: Mapped[float | None] = mapped_column(Float)
