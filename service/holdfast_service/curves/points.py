"""Takes what a job tells that it has measured, and keeps each curve bounded.

The caller holds the lock of the newest attempt's row (`training/attempts.py`): one report at a time adds to the curves
of a run. A point is its metric, attempt and step; a report that comes twice, or late, adds nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import ColumnElement, bindparam, delete, select, tuple_, update
from sqlalchemy.orm import Session

from holdfast_protocol.runs import MOST_CURVES, Measured, ToldPoint, thinned
from holdfast_service.db.dialect import insert_absent, insert_new
from holdfast_service.db.tables.curves import Curve, CurvePoint

MOST_POINTS = 2048
"""Of one curve, in the catalog. Beyond, it is thinned to half, so that the next thinning is far."""
HARD_MOST_POINTS = 3 * MOST_POINTS
THINNED_AT_ONCE = 2
"""Curves in one report: metrics that are logged together get beyond MOST_POINTS together, and to thin one takes long.
The largest come first. Two of them lose more points than a report may bring."""
_UNSYNCHRONIZED = {"synchronize_session": False}


def take_points(session: Session, run_id: str, attempt: int, told: Mapping[str, Sequence[ToldPoint]]) -> list[str]:
    """Adds what `attempt` has measured to the run's curves. Returns the metrics that get none, because the run has
    MOST_CURVES already. Without points it asks the database nothing."""
    named = sorted(name for name, points in told.items() if points)
    if not named:
        return []
    curves = _curves(session, run_id)
    if new := [name for name in named if name not in curves][: MOST_CURVES - len(curves)]:
        insert_absent(session, Curve, [{"run_id": run_id, "name": name, "points": 0} for name in new])
        curves = _curves(session, run_id)
    rows = [
        {
            "curve_id": curves[name].id,
            "attempt": attempt,
            "step": step,
            # Not by `MetricValue`, which would check a thousand points again while the run's lock is held.
            "value": None if isinstance(value, str) else value,
            "nonfinite": value if isinstance(value, str) else None,
        }
        for name in named
        if name in curves
        for step, value in told[name]
    ]
    added = Counter(row.curve_id for row in insert_new(session, CurvePoint, rows, CurvePoint.curve_id))
    if added:
        _count(session, curves.values(), added)
    return [name for name in named if name not in curves]


def _curves(session: Session, run_id: str) -> dict[str, Curve]:
    """By name."""
    found = session.scalars(select(Curve).where(Curve.run_id == run_id), execution_options={"populate_existing": True})
    return {curve.name: curve for curve in found}


def _count(session: Session, curves: Collection[Curve], added: Counter[int]) -> None:
    before = {curve.id: curve.points for curve in curves}
    counts = {curve_id: points + added[curve_id] for curve_id, points in before.items()}
    large = sorted((each for each in counts if counts[each] > MOST_POINTS), key=lambda each: (-counts[each], each))
    for at, curve_id in enumerate(large):
        if at < THINNED_AT_ONCE or counts[curve_id] > HARD_MOST_POINTS:
            counts[curve_id] = _thin(session, curve_id)
    if changed := [{"curve": each, "count": count} for each, count in counts.items() if count != before[each]]:
        session.connection().execute(_COUNTED, changed)


_COUNTED = update(Curve).where(Curve.id == bindparam("curve")).values(points=bindparam("count"))


def points_of(
    session: Session, curve_ids: Sequence[int], *conditions: ColumnElement[bool]
) -> dict[int, list[Measured]]:
    """By curve."""
    found: dict[int, list[Measured]] = {curve_id: [] for curve_id in curve_ids}
    columns = (CurvePoint.curve_id, CurvePoint.attempt, CurvePoint.step, CurvePoint.value, CurvePoint.nonfinite)
    for curve_id, attempt, step, value, nonfinite in session.execute(
        select(*columns).where(CurvePoint.curve_id.in_(curve_ids), *conditions)
    ):
        found[curve_id].append(Measured(attempt, step, float(nonfinite or 0) if value is None else value))
    return found


def _thin(session: Session, curve_id: int) -> int:
    """How many points it has afterwards."""
    points = points_of(session, [curve_id])[curve_id]
    kept = {(point.attempt, point.step) for point in thinned(points, MOST_POINTS // 2)}
    gone = [key for point in points if (key := (point.attempt, point.step)) not in kept]
    session.execute(
        delete(CurvePoint).where(
            CurvePoint.curve_id == curve_id, tuple_(CurvePoint.attempt, CurvePoint.step).in_(gone)
        ),
        execution_options=_UNSYNCHRONIZED,
    )
    return len(kept)
