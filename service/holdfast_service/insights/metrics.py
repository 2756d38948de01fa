"""How runs fare, for `/metrics`: true for all processes together, so take `max` and not `sum`.

By project and not by run, for runs come without number; the goodput of the newest ones alone, for it looks at every
attempt of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import RunStatus
from holdfast_service.context import ServiceContext
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Project, Run
from holdfast_service.insights.goodput import attempt_histories, goodput_of
from holdfast_service.runs.views import MOST_RUNS_TOLD, project_label, run_status

_RECENT = timedelta(days=1)


@dataclass(frozen=True)
class _Numbers:
    runs: dict[tuple[str, str], int] = field(default_factory=dict)  # by project and status
    ended: dict[tuple[str, str], int] = field(default_factory=dict)  # by project and outcome
    goodput: dict[str, float] = field(default_factory=dict)
    steps_lost: dict[str, int] = field(default_factory=dict)


class RunNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._numbers = CachedRead(context.database, _read, _Numbers())

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers()
        runs = GaugeMetricFamily(
            "holdfast_runs",
            "Runs by how they fare, without those whose newest attempt ended more than a day ago.",
            labels=("project", "status"),
        )
        for labels, count in sorted(numbers.runs.items()):
            runs.add_metric(labels, count)
        # A gauge, because it may fall: an attempt that was thought lost may call again.
        ended = GaugeMetricFamily(
            "holdfast_attempts_ended", "Attempts by why they ended.", labels=("project", "outcome")
        )
        for labels, count in sorted(numbers.ended.items()):
            ended.add_metric(labels, count)
        goodput = GaugeMetricFamily(
            "holdfast_goodput",
            "The share of their time that went into steps that they still have, of the runs that have an attempt open "
            f"or had one in the last day: of the {MOST_RUNS_TOLD} that were opened last.",
            labels=("project",),
        )
        lost = GaugeMetricFamily("holdfast_steps_lost", "Steps that these runs have run and lost.", labels=("project",))
        for project, share in sorted(numbers.goodput.items()):
            goodput.add_metric([project], share)
        for project, steps in sorted(numbers.steps_lost.items()):
            lost.add_metric([project], steps)
        yield from (runs, ended, goodput, lost)


def _read(session: Session) -> _Numbers:
    """Each statement joins the names for itself: on Postgres it may see a project that the one before did not."""
    now = database_now(session)
    newest = (Attempt.run_id == Run.id) & (Attempt.number == Run.latest_attempt)
    living = and_(Run.deleted_at.is_(None), Project.deleted_at.is_(None))
    recent = and_(living, or_(Attempt.ended_at.is_(None), Attempt.ended_at > now - _RECENT))
    status = run_status().label("status")
    names = session.scalars(select(Project.name).where(Project.deleted_at.is_(None)))
    runs = {(name, each.value): 0 for name in names for each in RunStatus}
    for name, each, count in session.execute(
        select(Project.name, status, func.count())
        .join(Run, Run.project_id == Project.id)
        .outerjoin(Attempt, newest)
        .where(recent)
        .group_by(Project.name, status)
    ):
        runs[name, each] = count
    ended: Counter[tuple[str, str]] = Counter()
    for name, outcome, count in session.execute(
        select(Project.name, Attempt.outcome, func.count())
        .join(Run, Run.project_id == Project.id)
        .join(Attempt, Attempt.run_id == Run.id)
        .where(Attempt.outcome.is_not(None))
        .group_by(Project.name, Attempt.outcome)
    ):
        ended[project_label(name), str(outcome)] += count
    active = session.execute(
        select(Run.id, Project.name)
        .join(Project, Project.id == Run.project_id)
        .join(Attempt, newest)
        .where(recent)
        .order_by(Attempt.opened_at.desc())
        .limit(MOST_RUNS_TOLD)
    ).all()
    productive: dict[str, float] = {}
    wall: dict[str, float] = {}
    lost: dict[str, int] = {}
    histories = attempt_histories(session, [run_id for run_id, _ in active])
    for run_id, name in active:
        found = goodput_of(histories.get(run_id, []), now)
        lost[name] = lost.get(name, 0) + found.steps_lost
        if found.goodput is not None:
            productive[name] = productive.get(name, 0.0) + found.productive_seconds
            wall[name] = wall.get(name, 0.0) + found.wall_seconds
    return _Numbers(runs, ended, {name: productive[name] / wall[name] for name in wall}, lost)
