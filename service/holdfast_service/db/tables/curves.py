"""What jobs have measured at their steps: the metric curves of runs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, ForeignKey, Integer, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import RowId
from holdfast_service.db.tables.core import Table


class Curve(Table):
    """A metric of a run, over all its attempts. `points`: how many rows it has, so that no heartbeat counts them."""

    __tablename__ = "curves"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str] = mapped_column(Text)
    points: Mapped[int] = mapped_column(Integer, default=0)
    __table_args__ = (UniqueConstraint("run_id", "name"),)


class CurvePoint(Table):
    """Written once, and deleted once its bucket is told by others. It goes with its curve's row."""

    __tablename__ = "curve_points"
    curve_id: Mapped[int] = mapped_column(ForeignKey("curves.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    value: Mapped[float | None] = mapped_column(Float)
    nonfinite: Mapped[str | None] = mapped_column(Text)  # nan, inf, -inf: not every database keeps these as numbers
