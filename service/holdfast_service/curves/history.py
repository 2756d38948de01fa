"""The curves of a run as people look at them: along the lineage as it is now, or of one attempt, with what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, select

from holdfast_protocol.checkpoints import nonfinite_name
from holdfast_protocol.runs import (
    MOST_POINTS_REPLIED,
    CurveSegment,
    Measured,
    MetricCurve,
    MetricPoint,
    MetricsHistory,
    thinned,
)
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.curves.points import points_of
from holdfast_service.db.tables.curves import Curve, CurvePoint
from holdfast_service.lineage.restore_choice import line_of_run
from holdfast_service.runs.views import attempt_numbered, run_named

_MOST_NAMED = 1000
"""Attempts in a query. Of a longer line all points are read."""


@dataclass(frozen=True)
class Asked:
    """Which points. No `names`: all metrics. `from_step` and `to_step` are within the range. `attempt`: all that this
    one told, also what the run went back behind; None: what lies on the run's lineage."""

    names: Sequence[str] = ()
    from_step: int | None = None
    to_step: int | None = None
    attempt: int | None = None
    most: int = 500


def read_history(context: ServiceContext, caller: Principal, project: str, run: str, asked: Asked) -> MetricsHistory:
    """At most `asked.most` points of each metric, and MOST_POINTS_REPLIED of all, thinned as the catalog thins them.

    The lineage is that of the newest attempt that has resumed or run a step: it hides what earlier attempts measured
    after the step that it goes on from, also before it has committed anything. Raises `forbidden`,
    `project_not_found`, `run_not_found` and `attempt_not_found`."""
    with context.database.read() as session:
        _, found = run_named(session, caller, project, run)
        if asked.attempt is not None:
            attempt_numbered(session, found, asked.attempt)
        line = line_of_run(session, found.id, also_uncommitted=True)
        curves = session.execute(select(Curve.name, Curve.id).where(Curve.run_id == found.id))
        ids = {curve.name: curve.id for curve in curves}
        shown = sorted(ids.keys() & set(asked.names) if asked.names else ids)
        conditions: list[ColumnElement[bool]] = []
        if asked.attempt is not None:
            conditions.append(CurvePoint.attempt == asked.attempt)
        elif len(line.segments) <= _MOST_NAMED:
            conditions.append(CurvePoint.attempt.in_([segment.attempt for segment in line.segments]))
        if asked.from_step is not None:
            conditions.append(CurvePoint.step >= asked.from_step)
        if asked.to_step is not None:
            conditions.append(CurvePoint.step <= asked.to_step)
        points = points_of(session, [ids[name] for name in shown], *conditions)
    most = min(asked.most, MOST_POINTS_REPLIED // max(len(shown), 1))
    metrics = []
    for name in shown:
        visible = (
            point for point in points[ids[name]] if asked.attempt is not None or (point.attempt, point.step) in line
        )
        metrics.append(MetricCurve(name=name, points=[_shown(point) for point in thinned(visible, most)]))
    return MetricsHistory(
        attempt=asked.attempt,
        segments=[CurveSegment(attempt=each.attempt, max_step=each.max_step) for each in line.segments],
        names=sorted(ids),
        metrics=metrics,
    )


def _shown(point: Measured) -> MetricPoint:
    nonfinite = nonfinite_name(point.value)
    return MetricPoint(
        step=point.step, attempt=point.attempt, value=point.value if nonfinite is None else None, nonfinite=nonfinite
    )
