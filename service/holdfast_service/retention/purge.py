"""The controller `purge`: trashed and due -> deleting -> deleted (rules read-lease, trash-first, holds-outrank,
record-outbox and two-verified-points).

    under the checkpoint's lock, in a later statement: due, not held, not pinned, without a reader,
    and its run has two other points that are healthy and proven at this moment                     -> deleting
    the commit record beside the data goes, from every store
    -> deleted, and only now may the collector take the chunks

A crash between two steps leaves `deleting`, which the next pass goes on with; every step may run twice. From `deleting`
on no person can take it back.

A jump of the clock, or a time without a pass, is no time in which a person could have looked into the trash: then each
end in it moves by the gap (rule database-clock).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import structlog
from sqlalchemy import ColumnElement, and_, func, or_, select, text, true, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import refuse_if_went_back
from holdfast_service.db.tables.core import GOING, Checkpoint, Project, Run
from holdfast_service.db.tables.operations import Controller
from holdfast_service.lineage.best_and_proven import PROVEN_POINTS
from holdfast_service.quotas.limits import HARD, STORED, stored_against_quota
from holdfast_service.records.history import settle_history
from holdfast_service.records.writing import remove_record
from holdfast_service.retention.forget import forget_deleted, forget_old
from holdfast_service.retention.trash import is_spare, lock_points, must_stay, proven_points, still_proven
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreError
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.work.report import MOST_COUNTED, Backlog, ReconcileReport


@dataclass(frozen=True)
class Pressure:
    """`disk`: a store's disk is fuller than HOLDFAST_TRASH_DISK_PERCENT, which concerns every project; `projects`: ids
    of those that use more of their quota than HOLDFAST_TRASH_QUOTA_PERCENT."""

    disk: bool = False
    projects: frozenset[str] = field(default_factory=frozenset)

    def early(self) -> ColumnElement[bool]:
        """Over `checkpoints` joined to `runs`: it goes now, whatever its `purge_at` says."""
        by_policy: ColumnElement[bool] = Checkpoint.trashed_by == "policy"
        return by_policy & (true() if self.disk else Run.project_id.in_(self.projects))


def pressure_now(session: Session, context: ServiceContext) -> Pressure:
    """Where room is so short that what a policy expired is purged before its time (rule trash-first). What a person
    deleted keeps its time: only that person knows whether they meant it."""
    rows = session.execute(select(Project.id, *(getattr(Project, HARD[kind]) for kind in STORED))).all()
    limited = {each: limits for each, *limits in rows if any(limit is not None for limit in limits)}
    used = stored_against_quota(session, context, limited) if limited else {}
    share = context.settings.trash_quota_percent / 100
    return Pressure(
        disk=any(_is_full(attached.store, context) for attached in context.stores if not attached.watch.unavailable),
        projects=frozenset(
            project_id
            for project_id, limits in limited.items()
            if any(
                quota is not None and used[project_id][kind] > quota * share
                for kind, quota in zip(STORED, limits, strict=True)
            )
        ),
    )


def _is_full(store: object, context: ServiceContext) -> bool:
    """A bucket has no end, and a mount that is unavailable says nothing. One that hangs must not be asked: whoever
    lists the controllers or reads the metrics would wait for it, with a session."""
    if not isinstance(store, PosixStore):
        return False
    try:
        usage = shutil.disk_usage(store.root)
    except OSError:
        return False
    # As df counts: what only root may use is not free to us.
    return usage.used > (usage.used + usage.free) * context.settings.trash_disk_percent / 100


NAME = "purge"
# Passes of the controllers' pause between two of this one: the trash is no hurry.
EVERY_ROUNDS = 12
LONGEST_PAUSES = 48
"""So many after passes that found nothing: a pass looks into a dozen tables for what is over."""
_MOST = 1000
_PORTION = 100
_SHORTEST_GAP = timedelta(minutes=5)
_ROUNDS = 5

_log = structlog.get_logger("holdfast.purge")


@dataclass(frozen=True, kw_only=True)
class PurgeReport(ReconcileReport):
    """`done`: checkpoints whose purge has ended; `moved_seconds`: by how much all ends in the trash were moved;
    `short_runs`: how many runs keep what is due, for they have fewer than two proven points beside it; `purged_runs`:
    deleted runs and projects that no person can take back from now on; `forgotten_rows`: what was over for long enough.
    """

    moved_seconds: float = 0.0
    short_runs: int = 0
    purged_runs: int = 0
    forgotten_rows: int = 0


@dataclass(frozen=True)
class _Going:
    checkpoint_id: str
    run_id: str
    project_id: str


def reconcile(context: ServiceContext) -> PurgeReport:
    settle_history(context)
    with context.database.transaction() as session:
        gap = _leave_out_gap(session, context.settings)
    if gap:
        return PurgeReport(moved_seconds=gap.total_seconds())
    with context.database.read() as session:
        pressure = pressure_now(session, context)
        short = _short_runs(session, pressure)
        due = _ids(session, _may_go(session, pressure, short))
    for run_id, checkpoint_ids in due.items():
        for first in range(0, len(checkpoint_ids), _PORTION):
            if not context.stopping.is_set():
                _begin(context, run_id, checkpoint_ids[first : first + _PORTION], pressure)
    with context.database.read() as session:
        going = _going(session)
    done = failed = 0
    error: str | None = None
    for each in going:
        if context.stopping.is_set():
            break
        try:
            done += _finish(context, each)
        except StoreError as unavailable:
            _log.warning("purge_waits", checkpoint=each.checkpoint_id, error=str(unavailable))
            failed, error = failed + 1, str(unavailable)
    runs = forget_deleted(context, Actor.controller(NAME))
    rows = forget_old(context, Actor.controller(NAME))
    return PurgeReport(
        done=done, failed=failed, error=error, short_runs=len(short), purged_runs=runs, forgotten_rows=rows
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    pressure = pressure_now(session, context)
    may_go = _may_go(session, pressure, _short_runs(session, pressure))
    due, oldest = 0, None
    # One by one: each has an index of its own.
    for waiting in (may_go, _is_deleting()):
        rows = select(Checkpoint.purge_at).join(Run, Run.id == Checkpoint.run_id).where(waiting)
        some = rows.order_by(Checkpoint.purge_at).limit(MOST_COUNTED).subquery()
        count, since = session.execute(select(func.count(), func.min(some.c.purge_at))).one()
        due, oldest = due + count, min((each for each in (oldest, since) if each is not None), default=None)
    return Backlog(due=due, oldest_due_at=oldest)


def _is_deleting() -> ColumnElement[bool]:
    """Over `checkpoints`. The text of the partial index, so that it is used."""
    return and_(text(GOING), Checkpoint.state == CheckpointState.DELETING)


def _is_due(session: Session, pressure: Pressure) -> ColumnElement[bool]:
    """Over `checkpoints` joined to `runs`."""
    return and_(
        Checkpoint.state == CheckpointState.TRASHED,
        or_(Checkpoint.purge_at <= database_now(session), pressure.early()),
    )


def _may_go(session: Session, pressure: Pressure, short: Collection[str]) -> ColumnElement[bool]:
    """What must stay is no work: it would fill every pass and keep out what may go."""
    spare = or_(Checkpoint.run_id.not_in(short), is_spare(session)) if short else true()
    return and_(_is_due(session, pressure), ~must_stay(session), spare)


def _short_runs(session: Session, pressure: Pressure) -> list[str]:
    """Runs that need what is due of them, for they have fewer than two proven points beside it."""
    needed = and_(_is_due(session, pressure), ~must_stay(session), ~is_spare(session))
    due = select(Checkpoint.run_id).join(Run, Run.id == Checkpoint.run_id).where(needed).distinct()
    return [run_id for run_id in session.scalars(due) if len(proven_points(session, run_id)) < PROVEN_POINTS]


def _ids(session: Session, condition: ColumnElement[bool]) -> dict[str, list[str]]:
    """By run."""
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.run_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(condition)
        .order_by(Checkpoint.purge_at, Checkpoint.id)
        .limit(_MOST)
    )
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.run_id, []).append(row.id)
    return found


def _begin(context: ServiceContext, run_id: str, checkpoint_ids: Sequence[str], pressure: Pressure) -> None:
    """Those that may still go are `deleting` afterwards. A reader takes the row FOR KEY SHARE; a person who takes back,
    holds or pins it FOR UPDATE: each of them is either before this lock, and seen, or after it, and sees `deleting`."""
    with context.database.transaction() as session:
        refuse_if_went_back(session)
        points = proven_points(session, run_id)
        locked = session.scalars(
            select(Checkpoint.id)
            .where(Checkpoint.id.in_(checkpoint_ids))
            .order_by(Checkpoint.id)
            .with_for_update(skip_locked=True)
        ).all()
        short = [] if lock_points(session, points) and still_proven(session, points) else [run_id]
        going = session.scalars(
            select(Checkpoint)
            .join(Run, Run.id == Checkpoint.run_id)
            .where(Checkpoint.id.in_(locked), _may_go(session, pressure, short))
            .order_by(Checkpoint.id),
            execution_options={"populate_existing": True},
        ).all()
        now = database_now(session)
        for checkpoint in going:
            checkpoint.state = CheckpointState.DELETING
            checkpoint.version += 1
            early = checkpoint.purge_at is not None and checkpoint.purge_at > now
            why = _why_early(context.settings, pressure, checkpoint) if early else ""
            _tell(session, checkpoint, "checkpoint.purge", CheckpointState.TRASHED, why)


def _going(session: Session) -> list[_Going]:
    rows = session.execute(
        select(Checkpoint.id, Run.id.label("run_id"), Run.project_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(_is_deleting())
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


def _why_early(settings: ServiceSettings, pressure: Pressure, checkpoint: Checkpoint) -> str:
    """A person was told that it can be taken back for longer."""
    short = (
        f"a store's disk is more than {settings.trash_disk_percent:g} % full"
        if pressure.disk
        else f"its project uses more than {settings.trash_quota_percent:g} % of its quota"
    )
    return f"purged before {checkpoint.purge_at:%Y-%m-%d %H:%M} UTC, for {short}"


def _tell(session: Session, checkpoint: Checkpoint, action: str, before: CheckpointState, why: str = "") -> None:
    project_id = session.scalar(select(Run.project_id).where(Run.id == checkpoint.run_id))
    record_event(
        session,
        Actor.controller(NAME),
        action,
        project_id=project_id,
        run_id=checkpoint.run_id,
        checkpoint_id=checkpoint.id,
        reason=": ".join(part for part in (checkpoint.trash_reason, why) if part) or None,
        before={"state": before.value},
        after={"state": checkpoint.state, "step": checkpoint.step},
    )


def is_gap(since_last_pass: timedelta, settings: ServiceSettings) -> bool:
    """Whether nobody looked after the trash for so long that its ends move. Pure."""
    usual = timedelta(seconds=settings.controller_interval_seconds * EVERY_ROUNDS)
    return since_last_pass > max(_SHORTEST_GAP, usual * _ROUNDS)


def _leave_out_gap(session: Session, settings: ServiceSettings) -> timedelta:
    """Notes this pass; by how much the ends were moved, zero in the ordinary case. A clock that went back moves
    nothing: the ends are further away then, which is safe."""
    now = database_now(session)
    insert_absent(session, Controller, [{"name": NAME, "reconciled_at": now}])
    row = session.execute(
        select(Controller).where(Controller.name == NAME).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()
    gap = now - row.reconciled_at
    row.reconciled_at = now
    if not is_gap(gap, settings):
        return timedelta()
    in_trash = ((Run, Run.purged_at.is_(None)), (Project, Project.purged_at.is_(None)))
    for table, waits in (*in_trash, (Checkpoint, Checkpoint.state == CheckpointState.TRASHED)):
        ends = session.execute(
            select(table.id, table.purge_at)
            .where(table.purge_at.is_not(None), waits)
            .order_by(table.id)
            .with_for_update()
        ).all()
        # In Python: the two databases have no common arithmetic on times.
        moved = [{"id": row.id, "purge_at": row.purge_at + gap} for row in ends]
        if moved:
            session.execute(update(table), moved)
    return gap
