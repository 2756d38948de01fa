"""How far the second store is behind, and what the last drills said, for `/metrics`: true for all processes together,
so take `max` and not `sum`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, OperationState, StoreRole
from holdfast_service.context import ServiceContext
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Project, Run
from holdfast_service.db.tables.operations import TO_COPY, CheckpointCopy, Operation
from holdfast_service.replicate.drill import KIND
from holdfast_service.replicate.lag import lag_of
from holdfast_service.runs.views import MOST_RUNS_TOLD, live_runs

_Labels = tuple[str, ...]


@dataclass(frozen=True)
class _Numbers:
    """By project and run; of drills by the store as well: one from the first store proves nothing of the second."""

    lag_seconds: dict[_Labels, float]
    lag_bytes: dict[_Labels, float]
    drill_age_seconds: dict[_Labels, float]
    drill_succeeded: dict[_Labels, float]


_OF_RUNS = ("project", "run")
_OF_DRILLS = (*_OF_RUNS, "store")


_NAMES = (
    (
        "holdfast_copy_lag_seconds",
        "For how long a state has been committed that the second store lacks: of the "
        f"{MOST_RUNS_TOLD} live runs that were opened last, and as many that wait for a copy.",
        "lag_seconds",
        _OF_RUNS,
    ),
    ("holdfast_copy_lag_bytes", "What is still to be copied to the second store.", "lag_bytes", _OF_RUNS),
    (
        "holdfast_drill_age_seconds",
        "Since the last drill of the run from this store ended.",
        "drill_age_seconds",
        _OF_DRILLS,
    ),
    (
        "holdfast_drill_succeeded",
        "1 if the last drill from this store restored and verified a checkpoint.",
        "drill_succeeded",
        _OF_DRILLS,
    ),
)


class CopyNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._numbers = CachedRead(
            context.database, functools.partial(_read, context=context), _Numbers({}, {}, {}, {})
        )

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers()
        for name, told, field, labels_of in _NAMES:
            gauge = GaugeMetricFamily(name, told, labels=labels_of)
            for labels, value in getattr(numbers, field).items():
                gauge.add_metric(labels, value)
            yield gauge


def _read(session: Session, context: ServiceContext) -> _Numbers:
    second = context.attached(StoreRole.SECOND)
    lags = {} if second is None else lag_of(session, second.store_id, _told_of(session, second.store_id))
    now = database_now(session)
    drills = _last_drills(session)
    rows = session.execute(
        select(Run.id, Project.name, Run.name)
        .join(Project, Project.id == Run.project_id)
        .where(Run.id.in_(lags.keys() | {run_id for run_id, _ in drills}))
    )
    names: dict[str, tuple[str, str]] = {run_id: (project, run) for run_id, project, run in rows}
    return _Numbers(
        lag_seconds={names[run_id]: lag.seconds(now) for run_id, lag in lags.items()},
        lag_bytes={names[run_id]: lag.missing_bytes for run_id, lag in lags.items()},
        drill_age_seconds={
            (*names[run_id], store): max(0.0, (now - drill.ended_at).total_seconds())
            for (run_id, store), drill in drills.items()
        },
        drill_succeeded={
            (*names[run_id], store): float(drill.state == OperationState.DONE)
            for (run_id, store), drill in drills.items()
        },
    )


def _told_of(session: Session, store_id: int) -> set[str]:
    """The live runs, and as many of those that wait for a copy: of a run that is over and copied there is nothing to
    tell."""
    waiting = (
        select(Checkpoint.run_id)
        .join(CheckpointCopy, CheckpointCopy.checkpoint_id == Checkpoint.id)
        .where(CheckpointCopy.store_id == store_id, text(f"({TO_COPY})"), Checkpoint.state == CheckpointState.COMMITTED)
        .distinct()
        .limit(MOST_RUNS_TOLD)
    )
    return {run_id for run_id, *_ in session.execute(live_runs())} | set(session.scalars(waiting))


@dataclass(frozen=True)
class _Drill:
    state: str
    ended_at: datetime


def _last_drills(session: Session) -> dict[tuple[str, str], _Drill]:
    """By run id and store, the one that ended last, of the MOST_RUNS_TOLD newest. Those that were cancelled say
    nothing, nor do those that a clock dated which was ahead; of a deleted run there is nothing to tell. What is started
    alike has one fingerprint, with the store in it: of each the last is read."""
    place = func.row_number().over(partition_by=Operation.fingerprint, order_by=Operation.ended_at.desc())
    ranked = (
        select(Operation.id, place.label("place"))
        .where(
            Operation.kind == KIND,
            Operation.state.in_((OperationState.DONE, OperationState.FAILED)),
            Operation.ended_at <= database_now(session),
        )
        .subquery()
    )
    newest = (
        select(Operation.run_id, Operation.arguments, Operation.state, Operation.ended_at)
        .join(ranked, ranked.c.id == Operation.id)
        .join(Run, Run.id == Operation.run_id)
        .where(ranked.c.place == 1, Run.deleted_at.is_(None))
        .order_by(Operation.ended_at.desc(), Operation.id)
    )
    found: dict[tuple[str, str], _Drill] = {}
    for run_id, arguments, state, ended_at in session.execute(newest).all():
        if len(found) < MOST_RUNS_TOLD and ended_at is not None:
            store = arguments.get("store", StoreRole.SECOND.value)
            found.setdefault((run_id, store), _Drill(state, ended_at))
    return found
