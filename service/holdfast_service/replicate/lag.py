"""How far a second store is behind, by run: from the rows, because they are cheap to ask and the same in every process.

The time counts from the oldest commit that is newer than the newest checkpoint which is whole there and from which a
launch would resume. That is what would be lost with the first store (RPO). A copy of what has diverged, is corrupt or
in quarantine, or is detached, hides nothing: the newest go there first, whatever their health. Which is newer, attempt
and step say, and not the moment of the commit: the clock may have gone back in between. A checkpoint that is not judged
yet counts as wanted: a controller that stands still must show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Row, Subquery, and_, exists, func, or_, select, true, tuple_
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.copies import ObjectivesPolicy, RunCopies
from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.states import CheckpointState, Health, StoreRole
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Checkpoint, Project, Run
from holdfast_service.db.tables.operations import CheckpointCopy, Policy
from holdfast_service.policies.policies import StoredPolicy, effective_policies
from holdfast_service.runs.views import project_named, run_named


@dataclass(frozen=True)
class RunLag:
    """`behind_since` is None if the newest wanted checkpoint is whole there."""

    newest_step: int | None = None
    newest_committed_at: datetime | None = None
    copied_step: int | None = None
    copied_committed_at: datetime | None = None
    behind_since: datetime | None = None
    missing_bytes: int = 0
    waiting: int = 0
    copied: int = 0
    error: str | None = None

    def seconds(self, now: datetime) -> float:
        return 0.0 if self.behind_since is None else max(0.0, (now - self.behind_since).total_seconds())

    @property
    def steps(self) -> int:
        return max(0, (self.newest_step or 0) - (self.copied_step or 0))


def lag_of(session: Session, store_id: int, run_ids: Collection[str] | None = None) -> dict[str, RunLag]:
    """By run id; only of runs that have something wanted or copied. `run_ids` None: of all."""
    rows = _rows(store_id, run_ids)
    newest = _newest(session, rows)
    since = _behind_since(session, rows)
    lags: dict[str, RunLag] = {}
    counted = session.execute(
        select(
            rows.c.run_id,
            func.count().filter(rows.c.whole),
            func.count().filter(~rows.c.whole),
            func.sum(rows.c.lacks).filter(~rows.c.whole),
            func.max(rows.c.error).filter(~rows.c.whole),
        ).group_by(rows.c.run_id)
    )
    for run_id, copied, waiting, lacks, error in counted:
        whole, lacking = newest.get((run_id, True)), newest.get((run_id, False))
        latest = max((each for each in (whole, lacking) if each is not None), key=_order, default=None)
        lags[run_id] = RunLag(
            newest_step=None if latest is None else latest.step,
            newest_committed_at=None if latest is None else latest.committed_at,
            copied_step=None if whole is None else whole.step,
            copied_committed_at=None if whole is None else whole.committed_at,
            behind_since=since.get(run_id),
            missing_bytes=int(lacks or 0),
            waiting=int(waiting),
            copied=int(copied),
            error=error,
        )
    return lags


def _rows(store_id: int | None, run_ids: Collection[str] | None, *, unwanted: bool = False) -> Subquery:
    """Committed checkpoints that are whole there, wanted there, or not judged yet. `unwanted`: the others as well.
    `store_id` None: there is no such store, and nothing is whole there."""
    row = CheckpointCopy
    has_policy = exists().where(
        Policy.project_id == Run.project_id, Policy.kind == PolicyKind.COPIES, Policy.run_id.in_(("", Run.id))
    )
    statement = (
        select(
            Checkpoint.run_id.label("run_id"),
            Checkpoint.committed_at.label("committed_at"),
            Checkpoint.attempt_number.label("attempt"),
            Checkpoint.step.label("step"),
            Checkpoint.detached.label("detached"),
            row.complete_at.is_not(None).label("whole"),
            and_(Checkpoint.health == Health.OK, ~Checkpoint.detached).label("resumable"),
            func.coalesce(row.missing_bytes, Checkpoint.chunk_bytes).label("lacks"),
            row.error.label("error"),
        )
        .join(Run, Run.id == Checkpoint.run_id)
        .outerjoin(row, and_(row.checkpoint_id == Checkpoint.id, row.store_id == store_id))
        .where(
            Checkpoint.state == CheckpointState.COMMITTED,
            # A corrupt one has nothing to copy from: what is lost with it is told by its own health.
            or_(
                row.complete_at.is_not(None),
                and_(
                    Checkpoint.health != Health.CORRUPT,
                    true() if unwanted else or_(row.wanted, and_(row.checkpoint_id.is_(None), has_policy)),
                ),
            ),
        )
    )
    if run_ids is not None:
        statement = statement.where(Checkpoint.run_id.in_(run_ids))
    return statement.subquery()


def _newest(session: Session, rows: Subquery) -> dict[tuple[str, bool], Row[Any]]:
    """By run and whether it is whole there."""
    ranked = _ranked(rows, rows.c.run_id, rows.c.whole)
    found = session.execute(select(ranked).where(ranked.c.place == 1))
    return {(row.run_id, bool(row.whole)): row for row in found}


def _order(row: Row[Any]) -> tuple[bool, int, int]:
    """What is detached is no newer state."""
    return not row.detached, row.attempt, row.step


def _ranked(rows: Subquery, *within: ColumnElement[Any], where: ColumnElement[bool] | None = None) -> Subquery:
    """The rows with the place of each in the opposite of `_order`."""
    newest_first = (rows.c.detached, rows.c.attempt.desc(), rows.c.step.desc())
    place = func.row_number().over(partition_by=within, order_by=newest_first).label("place")
    return select(rows, place).where(true() if where is None else where).subquery()


def _behind_since(session: Session, rows: Subquery) -> dict[str, datetime]:
    whole = _ranked(rows, rows.c.run_id, where=and_(rows.c.whole, rows.c.resumable))
    is_newer = tuple_(rows.c.attempt, rows.c.step) > tuple_(whole.c.attempt, whole.c.step)
    found = session.execute(
        select(rows.c.run_id, func.min(rows.c.committed_at))
        .outerjoin(whole, and_(whole.c.run_id == rows.c.run_id, whole.c.place == 1))
        .where(~rows.c.whole, or_(whole.c.place.is_(None), and_(~rows.c.detached, is_newer)))
        .group_by(rows.c.run_id)
    )
    return {row[0]: row[1] for row in found}


@dataclass(frozen=True)
class Objectives:
    """None: there is no such objective."""

    rpo_seconds: float | None = None
    rto_seconds: float | None = None


def objectives_of(policy: StoredPolicy | None) -> Objectives:
    """None for what a policy of a later version says, and this one does not know. Pure."""
    try:
        found = None if policy is None else read_policy(PolicyKind.OBJECTIVES, policy.document)
    except PolicyError:
        return Objectives()
    if not isinstance(found, ObjectivesPolicy):
        return Objectives()
    return Objectives(found.rpo_seconds, found.rto_seconds)


_CURSOR = "copies"
# Of so many runs at a time it is found out which are late: a statement has a bound on its parameters, and a page may be
# full before the last run.
_RUNS_AT_ONCE = 250


def copies_of_run(context: ServiceContext, caller: Principal, project: str, run: str) -> RunCopies:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        return _views(session, context, owner, [found])[0]


def copies_of_project(
    context: ServiceContext, caller: Principal, project: str, *, late: bool = False, cursor: str | None, limit: int
) -> Page[RunCopies]:
    """Every run of it, by name; `late`: those alone that miss their objective (RPO). Raises `forbidden`,
    `project_not_found` and `invalid_request`."""
    query = select(Run).order_by(Run.name)
    if cursor is not None:
        (after,) = decode_cursor(_CURSOR, cursor, str)
        query = query.where(Run.name > after)
    with context.database.read() as session:
        owner = project_named(session, caller, project)
        query = query.where(Run.project_id == owner.id, Run.deleted_at.is_(None))
        if late:
            runs = session.scalars(query).all()
            found: Sequence[Run] = list(islice(_late_ones(session, context, owner, runs), limit + 1))
        else:
            found = session.scalars(query.limit(limit + 1)).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (row.name,))
        return Page(items=_views(session, context, owner, rows), next_cursor=next_cursor)


@dataclass(frozen=True)
class _Exposure:
    """A run's objective (RPO), and what it is compared with. Both None: there is no objective."""

    objective_seconds: float | None = None
    seconds: float | None = None

    @property
    def is_late(self) -> bool:
        if self.objective_seconds is None or self.seconds is None:
            return False
        return self.seconds > self.objective_seconds


def _late_ones(session: Session, context: ServiceContext, project: Project, runs: Sequence[Run]) -> Iterator[Run]:
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        some = runs[first : first + _RUNS_AT_ONCE]
        exposures = _exposures(session, context, project, some)
        yield from (run for run in some if exposures[run.id].is_late)


def _exposures(
    session: Session, context: ServiceContext, project: Project, runs: Sequence[Run]
) -> dict[str, _Exposure]:
    """By the id of each of these runs."""
    policy_of = effective_policies(session, PolicyKind.OBJECTIVES, project_id=project.id)
    objectives = {run.id: objectives_of(policy_of(project.id, run.id)).rpo_seconds for run in runs}
    with_objective = [run_id for run_id, seconds in objectives.items() if seconds is not None]
    if not with_objective:
        return {run.id: _Exposure() for run in runs}
    second = context.attached(StoreRole.SECOND)
    store_id = None if second is None else second.store_id
    since = _behind_since(session, _rows(store_id, with_objective, unwanted=True))
    now = database_now(session)
    return {
        run_id: _Exposure()
        if objective is None
        else _Exposure(objective, RunLag(behind_since=since.get(run_id)).seconds(now))
        for run_id, objective in objectives.items()
    }


def _views(session: Session, context: ServiceContext, project: Project, runs: Sequence[Run]) -> list[RunCopies]:
    second = context.attached(StoreRole.SECOND)
    lags = {} if second is None else lag_of(session, second.store_id, [run.id for run in runs])
    exposures = _exposures(session, context, project, runs)
    policy_of = effective_policies(session, PolicyKind.COPIES, project_id=project.id)
    now = database_now(session)
    views = []
    for run in runs:
        lag, exposure = lags.get(run.id, RunLag()), exposures[run.id]
        views.append(
            RunCopies(
                project=project.name,
                run=run.name,
                store=None if second is None else StoreRole.SECOND,
                policy=policy_of(project.id, run.id) is not None,
                newest_step=lag.newest_step,
                newest_committed_at=lag.newest_committed_at,
                copied_step=lag.copied_step,
                copied_committed_at=lag.copied_committed_at,
                lag_seconds=lag.seconds(now),
                rpo_objective_seconds=exposure.objective_seconds,
                rpo_seconds=exposure.seconds,
                lag_steps=lag.steps,
                lag_bytes=lag.missing_bytes,
                waiting=lag.waiting,
                copied=lag.copied,
                error=lag.error,
            )
        )
    return views
