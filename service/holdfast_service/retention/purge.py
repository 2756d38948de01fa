"""The controller `purge`: trashed and due -> deleting -> deleted (protocol rules 21, 26, 29 and 30).

    under the checkpoint's lock, in a later statement: due, not held, not pinned, nobody reads it   -> deleting
    the commit record beside the data goes, from every store
    -> deleted, and only now may the collector take the chunks

A crash between two steps leaves `deleting`, which the next round goes on with; every step may run twice. From
`deleting` on nobody can take it back.

A jump of the clock, or a time in which no round was, is no time in which anybody could have looked into the trash: then
each end in it moves by the gap (protocol rule 31).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import structlog
from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.commit_records import remove_record
from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.rounds import Backlog, RoundReport
from holdfast_service.catalog.tables import Checkpoint, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.retention.in_force import must_stay
from holdfast_service.retention.pressure import Pressure, pressure_now
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreError

NAME = "purge"
# Rounds of the controllers' pause between two of this one: the trash is no hurry.
EVERY_ROUNDS = 12
_MOST = 1000
_SHORTEST_GAP = timedelta(minutes=5)
_ROUNDS = 5

_log = structlog.get_logger("holdfast.purge")


@dataclass(frozen=True, kw_only=True)
class PurgeReport(RoundReport):
    """`done`: checkpoints whose purge has ended; `moved_seconds`: by how much all ends in the trash were moved."""

    moved_seconds: float = 0.0


@dataclass(frozen=True)
class _Going:
    checkpoint_id: str
    run_id: str
    project_id: str


def tick(context: ServiceContext) -> PurgeReport:
    with context.database.transaction() as session:
        gap = _leave_out_gap(session, context.settings)
    if gap:
        return PurgeReport(moved_seconds=gap.total_seconds())
    with context.database.read() as session:
        pressure = pressure_now(session, context)
        due = _ids(session, _is_due(session, pressure))
    for checkpoint_id in due:
        if context.stopping.is_set():
            break
        _begin(context, checkpoint_id, pressure)
    with context.database.read() as session:
        going = _going(session)
    done = failed = 0
    error: str | None = None
    for each in going:
        if context.stopping.is_set():
            break
        try:
            done += _finish(context, each)
        except StoreError as away:
            _log.warning("purge_waits", checkpoint=each.checkpoint_id, error=str(away))
            failed, error = failed + 1, str(away)
    return PurgeReport(done=done, failed=failed, error=error)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    waiting = or_(
        and_(_is_due(session, pressure_now(session, context)), ~must_stay(session)),
        Checkpoint.state == CheckpointState.DELETING,
    )
    due, oldest = session.execute(
        select(func.count(), func.min(Checkpoint.purge_at)).join(Run, Run.id == Checkpoint.run_id).where(waiting)
    ).one()
    return Backlog(due=due, oldest_due_at=oldest)


def _is_due(session: Session, pressure: Pressure) -> ColumnElement[bool]:
    """Over `checkpoints` joined to `runs`."""
    return and_(
        Checkpoint.state == CheckpointState.TRASHED,
        or_(Checkpoint.purge_at <= database_now(session), pressure.early()),
    )


def _ids(session: Session, condition: ColumnElement[bool]) -> list[str]:
    return list(
        session.scalars(
            select(Checkpoint.id)
            .join(Run, Run.id == Checkpoint.run_id)
            # What must stay is no work: it would fill every round and keep out what may go.
            .where(condition, ~must_stay(session))
            .order_by(Checkpoint.purge_at, Checkpoint.id)
            .limit(_MOST)
        )
    )


def _begin(context: ServiceContext, checkpoint_id: str, pressure: Pressure) -> bool:
    """Whether it is `deleting` now. Who reads takes the row FOR KEY SHARE, who takes back, holds or pins it FOR UPDATE:
    each of them is either before this lock, and seen, or after it, and sees `deleting`."""
    with context.database.transaction() as session:
        locked = session.scalar(
            select(Checkpoint.id).where(Checkpoint.id == checkpoint_id).with_for_update(skip_locked=True)
        )
        if locked is None:
            return False
        checkpoint = session.scalar(
            select(Checkpoint)
            .join(Run, Run.id == Checkpoint.run_id)
            .where(Checkpoint.id == checkpoint_id, _is_due(session, pressure), ~must_stay(session)),
            execution_options={"populate_existing": True},
        )
        if checkpoint is None:
            return False
        checkpoint.state = CheckpointState.DELETING
        checkpoint.version += 1
        _tell(session, checkpoint, "checkpoint.purge", CheckpointState.TRASHED)
    return True


def _going(session: Session) -> list[_Going]:
    rows = session.execute(
        select(Checkpoint.id, Run.id.label("run_id"), Run.project_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(Checkpoint.state == CheckpointState.DELETING)
        .order_by(Checkpoint.id)
        .limit(_MOST)
    )
    return [_Going(row.id, row.run_id, row.project_id) for row in rows]


def _finish(context: ServiceContext, going: _Going) -> bool:
    """Raises StoreError while the record cannot be removed: then it stays `deleting`, and all of its chunks stay."""
    remove_record(context, going.project_id, going.checkpoint_id)
    with context.database.transaction() as session:
        checkpoint = session.scalar(
            select(Checkpoint)
            .where(Checkpoint.id == going.checkpoint_id, Checkpoint.state == CheckpointState.DELETING)
            .with_for_update(),
            execution_options={"populate_existing": True},
        )
        if checkpoint is None:  # another process was as fast
            return False
        checkpoint.state = CheckpointState.DELETED
        checkpoint.deleted_at = database_now(session)
        checkpoint.version += 1
        _tell(session, checkpoint, "checkpoint.delete", CheckpointState.DELETING)
    return True


def _tell(session: Session, checkpoint: Checkpoint, action: str, before: CheckpointState) -> None:
    project_id = session.scalar(select(Run.project_id).where(Run.id == checkpoint.run_id))
    record_event(
        session,
        Actor.controller(NAME),
        action,
        project_id=project_id,
        run_id=checkpoint.run_id,
        checkpoint_id=checkpoint.id,
        reason=checkpoint.trash_reason or None,
        before={"state": before.value},
        after={"state": checkpoint.state, "step": checkpoint.step},
    )


def _leave_out_gap(session: Session, settings: ServiceSettings) -> timedelta:
    """Notes this round; by how much the ends were moved, zero in the ordinary case. A clock that went back moves
    nothing: the ends are further away then, which is safe."""
    now = database_now(session)
    insert_absent(session, Controller, [{"name": NAME, "ticked_at": now}])
    row = session.execute(
        select(Controller).where(Controller.name == NAME).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()
    gap = now - row.ticked_at
    row.ticked_at = now
    usual = timedelta(seconds=settings.controller_interval_seconds * EVERY_ROUNDS)
    if gap <= max(_SHORTEST_GAP, usual * _ROUNDS):
        return timedelta()
    ends = session.execute(
        select(Checkpoint.id, Checkpoint.purge_at)
        .where(Checkpoint.state == CheckpointState.TRASHED)
        .order_by(Checkpoint.id)
        .with_for_update()
    ).all()
    # In Python: the two databases have no common arithmetic on times.
    moved = [{"id": row.id, "purge_at": row.purge_at + gap} for row in ends if row.purge_at is not None]
    if moved:
        session.execute(update(Checkpoint), moved)
    return gap
