"""What the catalog has measured of a run, its project and the fleet: uptimes, and what saves cost. Reads only.

Only the newest attempts and saves count: hardware, state and store change. An attempt that never ran a step had nothing
to lose, and says nothing of how often work is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from holdfast_protocol.advice import AdviceSource
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState
from holdfast_service.catalog.lost_time import SaveCost, Uptime
from holdfast_service.catalog.save_interval import Measured, Pool
from holdfast_service.catalog.tables import Attempt, Checkpoint, Run

_ATTEMPTS = 300
_OTHERS_ATTEMPTS = 500
_SAVES = 30
_OTHERS_RUNS = 5
_LOSES_WORK = (AttemptOutcome.FAILED, AttemptOutcome.LOST, AttemptOutcome.PREEMPTED, AttemptOutcome.FENCED)
_ATTEMPT: Select[*tuple[Any, ...]] = select(
    Attempt.id,
    Attempt.run_id,
    Attempt.opened_at,
    Attempt.heartbeat_at,
    Attempt.progressed_at,
    Attempt.ended_at,
    Attempt.outcome,
    Attempt.last_step,
    Attempt.restore_seconds,
    Attempt.steps_per_second,
    Attempt.rolled_back_at,
)


@dataclass(frozen=True)
class Others:
    """What a project's runs, or all, went through and paid: `cost` of `saves` saves, None where nothing was saved."""

    pool: Pool
    cost: SaveCost | None
    saves: int


def read_measured(session: Session, run: Run, project: Others, fleet: Others) -> Measured:
    """What a save costs: by the run's own newest saves, else by its project's, else by anyone's."""
    rows = session.execute(
        _ATTEMPT.where(Attempt.run_id == run.id).order_by(Attempt.number.desc()).limit(_ATTEMPTS)
    ).all()
    cost, saves = _save_cost(session, [run.id])
    source = AdviceSource.RUN
    for others, of in ((project, AdviceSource.PROJECT), (fleet, AdviceSource.FLEET)):
        if cost is None:
            cost, saves, source = others.cost, others.saves, of
    return Measured(
        uptimes=_uptimes(session, rows),
        project=project.pool,
        fleet=fleet.pool,
        cost=cost,
        cost_source=source if cost is not None else AdviceSource.DEFAULT,
        saves=saves,
        steps_per_second=next((row.steps_per_second for row in rows if row.steps_per_second), None),
        restart_seconds=_restart_seconds(rows),
    )


def read_others(session: Session, project_id: str | None = None) -> Others:
    """Of a project; without one of all."""
    statement = _ATTEMPT.order_by(Attempt.id.desc()).limit(_OTHERS_ATTEMPTS)
    if project_id is not None:
        statement = statement.join(Run, Run.id == Attempt.run_id).where(Run.project_id == project_id)
    rows = session.execute(statement).all()
    uptimes = _uptimes(session, rows)
    pool = Pool(sum(each.seconds for each in uptimes), sum(1 for each in uptimes if each.interrupted))
    newest_runs = list(dict.fromkeys(row.run_id for row in rows))[:_OTHERS_RUNS]
    return Others(pool, *_save_cost(session, newest_runs))


def _uptimes(session: Session, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[Uptime]:
    """Time in a restore is no time of training. An attempt that saved when it was told to go has lost nothing, and one
    that its own job left for an older checkpoint has thrown away what it wanted to."""
    in_time = _saved_in_time(session, [row for row in rows if row.outcome == AttemptOutcome.PREEMPTED])
    found = []
    for row in rows:
        if row.last_step is None:
            continue
        seconds = (_last_sign(row) - row.opened_at).total_seconds() - (row.restore_seconds or 0.0)
        loses = row.outcome in _LOSES_WORK and row.rolled_back_at is None and row.id not in in_time
        found.append(Uptime(max(0.0, seconds), loses))
    return found


def _saved_in_time(session: Session, preempted: Sequence[Row[*tuple[Any, ...]]]) -> set[int]:
    """Those of these attempts whose emergency save was committed."""
    if not preempted:
        return set()
    statement = select(Checkpoint.attempt_id).where(
        Checkpoint.run_id.in_({row.run_id for row in preempted}),
        Checkpoint.attempt_id.in_([row.id for row in preempted]),
        Checkpoint.kind == CheckpointKind.EMERGENCY,
        Checkpoint.committed_at.is_not(None),
    )
    return set(session.scalars(statement))


def _last_sign(row: Row[*tuple[Any, ...]]) -> datetime:
    """Of training. When the reaper noticed, or the next attempt came, is later than when work ended."""
    if row.outcome in (AttemptOutcome.FINISHED, AttemptOutcome.FAILED, AttemptOutcome.PREEMPTED):
        ended: datetime = row.ended_at
        return min(row.progressed_at or ended, ended)
    seen: datetime = row.progressed_at or row.heartbeat_at or row.opened_at
    return seen


def _restart_seconds(newest_first: Sequence[Row[*tuple[Any, ...]]]) -> float | None:
    """From the last sign of an interrupted attempt to the next one's training; the median, for somebody may have slept
    in between."""
    gaps = [
        max(0.0, (later.opened_at - _last_sign(earlier)).total_seconds()) + (later.restore_seconds or 0.0)
        for later, earlier in pairwise(newest_first)
        if earlier.outcome in _LOSES_WORK
    ]
    return median(gaps) if gaps else None


def _save_cost(session: Session, run_ids: Sequence[str]) -> tuple[SaveCost | None, int]:
    """Of the newest saves of these runs, and how many they were."""
    saves = [save for run_id in run_ids for save in _saves(session, run_id, _SAVES // len(run_ids))]
    if not saves:
        return None, 0
    # What blocks is paid each time, so its mean. One save that waited for an outage is an exception.
    blocked = fmean(save.blocked_seconds for save in saves)
    durable = median((save.committed_at - save.created_at).total_seconds() for save in saves)
    return SaveCost(blocked, max(0.0, durable)), len(saves)


def _saves(session: Session, run_id: str, most: int) -> Sequence[Row[*tuple[Any, ...]]]:
    return session.execute(
        select(Checkpoint.created_at, Checkpoint.committed_at, Checkpoint.blocked_seconds)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.pushed_by.is_(None),  # a late save waited in a spool
            Checkpoint.blocked_seconds.is_not(None),
        )
        .order_by(Checkpoint.step.desc())
        .limit(most)
    ).all()
