"""Committed -> trashed, the one way in which a checkpoint expires; and back again.

What keeps a checkpoint where it is are conditions of a query, asked anew under the checkpoint's lock, in a later
statement than the one that took it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.policies.retention import Reason
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import UndeleteCheckpoint
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import refuse_if_went_back
from holdfast_service.db.tables.core import Checkpoint, ReadLease, Run
from holdfast_service.errors import ProblemError
from holdfast_service.holds.held import is_held, pin_in_force
from holdfast_service.lineage.best_and_proven import PROVEN_POINTS, newest_proven, proven_among
from holdfast_service.records.history import settle_history
from holdfast_service.retention.pins import pinned_now, set_pin
from holdfast_service.retention.plan import Fact
from holdfast_service.runs.views import checkpoint_by_id, current_checkpoint_view, locked_checkpoint, refuse_if_deleted


def is_pinned(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a pin whose end has not come by the database's clock."""
    return pin_in_force(database_now(session))


def is_being_read(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a lease that has not run out. It outlives every ticket given under it (rule read-lease)."""
    return exists().where(ReadLease.checkpoint_id == Checkpoint.id, ReadLease.expires_at > database_now(session))


def must_stay(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a person holds or has pinned it, or a reader has it open."""
    return or_(is_held(session), is_pinned(session), is_being_read(session))


_COUNTS = and_(Checkpoint.state == CheckpointState.COMMITTED, Checkpoint.health == Health.OK)


def proven_points(session: Session, run_id: str) -> list[str]:
    """The ids of the two newest committed points that are healthy and proven; fewer if the run has fewer."""
    newest_first = session.scalars(
        select(Checkpoint.id)
        .where(Checkpoint.run_id == run_id, _COUNTS)
        .order_by(Checkpoint.step.desc(), Checkpoint.attempt_number.desc(), Checkpoint.id)
    ).all()
    return newest_proven(session, newest_first)


def lock_points(session: Session, points: Sequence[str]) -> bool:
    """Whether all of them could be locked. A process that finds a chunk bad locks each checkpoint that needs it: while
    these are locked none of them gets worse. It does not wait: another order of locks would deadlock."""
    locked = session.scalars(
        select(Checkpoint.id).where(Checkpoint.id.in_(points)).with_for_update(read=True, skip_locked=True)
    ).all()
    return len(locked) == len(points)


def still_proven(session: Session, points: Collection[str]) -> bool:
    """Whether there are two of them yet, and each is as it was. Called after `lock_points`, in a later statement.

    A run can spare what is in its trash only if it has two other points that are proven now (rule two-verified-points).
    The plan counted them when it was made. By the time of the purge one may have been found bad, and the trash is what
    the run has left.
    """
    healthy = session.scalars(select(Checkpoint.id).where(Checkpoint.id.in_(points), _COUNTS)).all()
    return len(proven_among(session, healthy)) >= PROVEN_POINTS


def is_spare(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints` in the trash joined to `runs`, where the run has fewer than two proven points: it may go
    nevertheless.

    What is diverged or in quarantine is no point. And nothing has to be kept for a run that a person has deleted, or of
    which they have deleted everything that they could, healthy points with it.
    """
    other = aliased(Checkpoint)
    of_run = other.run_id == Checkpoint.run_id
    committed = and_(of_run, other.state == CheckpointState.COMMITTED)
    free = and_(~is_held(session, other), ~pin_in_force(database_now(session), other))
    return or_(
        Checkpoint.health.not_in((Health.OK, Health.CORRUPT)),
        Run.deleted_at.is_not(None),
        and_(~exists().where(committed), _healthy_went_last()),
        and_(
            Checkpoint.trashed_by == "person",
            ~exists().where(committed, free),
            ~exists().where(committed, other.health != Health.OK),
        ),
    )


def _healthy_went_last() -> ColumnElement[bool]:
    """Over `checkpoints`: what a person has deleted last of the run had a healthy point in it. Else they have only
    cleared away what was found bad, and the healthy points in the trash are all that the run has."""
    other, any_of_run = aliased(Checkpoint), aliased(Checkpoint)
    last = select(func.max(any_of_run.trashed_at)).where(any_of_run.run_id == Checkpoint.run_id)
    return exists().where(
        other.run_id == Checkpoint.run_id,
        other.health == Health.OK,
        other.trashed_by == "person",
        other.trashed_at >= last.correlate(Checkpoint).scalar_subquery(),
    )


TrashedBy = Literal["policy", "person", "run"]


@dataclass(frozen=True)
class Trashing:
    """Who, and why. `keep_for`: until the purge."""

    by: TrashedBy
    actor: Actor
    reason: str
    keep_for: timedelta

    @classmethod
    def by_policy(cls, context: ServiceContext, actor: Actor, reason: str) -> Trashing:
        return cls("policy", actor, reason, timedelta(seconds=context.settings.trash_policy_seconds))

    @classmethod
    def by_person(cls, context: ServiceContext, actor: Actor, reason: str) -> Trashing:
        return cls("person", actor, reason, timedelta(seconds=context.settings.trash_person_seconds))

    @classmethod
    def with_its_run(cls, context: ServiceContext, actor: Actor, reason: str) -> Trashing:
        """By this it is told from what was in the trash before the run was deleted."""
        return cls("run", actor, reason, timedelta(seconds=context.settings.trash_person_seconds))


def lock_run(session: Session, run_id: str) -> Run:
    """FOR UPDATE, as opening an attempt has it: what is read in later statements stays so until the end."""
    return session.execute(
        select(Run).where(Run.id == run_id).with_for_update(), execution_options={"populate_existing": True}
    ).scalar_one()


def move_to_trash(
    session: Session,
    run: Run,
    facts: Sequence[Fact],
    trashing: Trashing,
    reasons: Mapping[str, Sequence[Reason]] | None = None,
) -> tuple[set[str], datetime]:
    """The one way in which a checkpoint expires, for policies and for people (rule trash-first). The ids of those that
    went, and when their purge may begin. `reasons` go into each one's event.

    The caller holds the run's row FOR UPDATE: no commit, no new attempt and no "resumed from" changes what it has
    decided. What has its own lock is checked again here: the checkpoints' rows are locked, in order, and a LATER
    statement leaves out each that was changed since (its version says so), is held or pinned by now, or has a reader.
    """
    versions = {fact.id: fact.version for fact in facts}
    free = _free(session, versions)
    now = database_now(session)
    purge_at = now + trashing.keep_for
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.id.in_(free))
        .values(
            state=CheckpointState.TRASHED,
            trashed_at=now,
            trashed_by=trashing.by,
            trash_reason=trashing.reason,
            purge_at=purge_at,
            version=Checkpoint.version + 1,
        ),
        execution_options={"synchronize_session": False},
    )
    for fact in facts:
        if fact.id in free:
            said = "; ".join(reason.detail for reason in (reasons or {}).get(fact.id, ()))
            record_event(
                session,
                trashing.actor,
                "checkpoint.expire" if trashing.by == "policy" else "checkpoint.trash",
                project_id=run.project_id,
                run_id=run.id,
                checkpoint_id=fact.id,
                reason=": ".join(part for part in (trashing.reason, said) if part) or None,
                before={"state": CheckpointState.COMMITTED.value},
                after={"state": CheckpointState.TRASHED.value, "step": fact.step, "purge_at": purge_at.isoformat()},
            )
    return free, purge_at


def _free(session: Session, versions: Mapping[str, int]) -> set[str]:
    ids: Collection[str] = sorted(versions)
    session.execute(select(Checkpoint.id).where(Checkpoint.id.in_(ids)).order_by(Checkpoint.id).with_for_update()).all()
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.version).where(
            Checkpoint.id.in_(ids), Checkpoint.state == CheckpointState.COMMITTED, ~must_stay(session)
        )
    )
    return {row.id for row in rows if row.version == versions[row.id]}


_PIN_REASON = "taken back from the trash"
_LIVE = (CheckpointState.UPLOADING, CheckpointState.COMMITTED)


def undelete_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: UndeleteCheckpoint
) -> CheckpointView:
    """Trashed -> committed, until the purge begins (rule trash-first). A committed one stays as it is: twice is fine.
    What a policy expired it would expire again in minutes: it is pinned for a while unless the caller says otherwise.

    Raises `checkpoint_not_found`, `run_not_found` if the whole run was deleted, `chunk_gone` once its purge has begun,
    `checkpoint_conflict` if the same step was saved anew or it was never in the trash, and `catalog_went_back`: what
    the database lost may be the purge of this very one.
    """
    settle_history(context)
    with context.database.transaction() as session:
        refuse_if_went_back(session)
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        # A rank that begins the same step anew passes the fence, which waits for this.
        refuse_if_deleted(project, lock_run(session, run.id))
        checkpoint = locked_checkpoint(session, checkpoint_id)
        if checkpoint.state != CheckpointState.COMMITTED:
            _refuse_unless_in_trash(checkpoint)
            _refuse_if_saved_anew(session, checkpoint)
            _take_back(session, context, caller, checkpoint, request)
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.undelete",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint_id,
                before={"state": CheckpointState.TRASHED.value},
                after={"state": CheckpointState.COMMITTED.value, "pinned": pinned_now(session, checkpoint)},
            )
        session.flush()
        return current_checkpoint_view(session, project.name, run.name, checkpoint)


def _take_back(
    session: Session, context: ServiceContext, caller: Principal, checkpoint: Checkpoint, request: UndeleteCheckpoint
) -> None:
    pin = checkpoint.trashed_by == "policy" if request.pin is None else request.pin
    if pin and not pinned_now(session, checkpoint):
        now = database_now(session)
        # As long as a person's own deletion can be thought over.
        until = now + timedelta(seconds=context.settings.trash_person_seconds)
        set_pin(checkpoint, caller.name, _PIN_REASON, now, until)
    out_of_trash(checkpoint)


def out_of_trash(checkpoint: Checkpoint) -> None:
    """The caller has its lock, and has seen it in the trash."""
    checkpoint.state = CheckpointState.COMMITTED
    checkpoint.trashed_at = checkpoint.trashed_by = checkpoint.trash_reason = checkpoint.purge_at = None
    checkpoint.version += 1


def _refuse_unless_in_trash(checkpoint: Checkpoint) -> None:
    if checkpoint.state == CheckpointState.TRASHED:
        return
    if checkpoint.state in (CheckpointState.DELETING, CheckpointState.DELETED):
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The purge of step {checkpoint.step} has begun, and its bytes are going. It cannot be taken back.",
            checkpoint_id=checkpoint.id,
            state=checkpoint.state,
        )
    raise ProblemError(
        ProblemCode.CHECKPOINT_CONFLICT,
        f"Step {checkpoint.step} is {checkpoint.state} and not in the trash. `holdfast checkpoints list "
        "PROJECT/RUN --deleted` shows what is.",
        checkpoint_id=checkpoint.id,
        state=checkpoint.state,
    )


def _refuse_if_saved_anew(session: Session, checkpoint: Checkpoint) -> None:
    anew = session.scalar(
        select(Checkpoint.id).where(
            Checkpoint.run_id == checkpoint.run_id,
            Checkpoint.attempt_number == checkpoint.attempt_number,
            Checkpoint.step == checkpoint.step,
            Checkpoint.detached == checkpoint.detached,
            Checkpoint.state.in_(_LIVE),
        )
    )
    if anew is not None:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Attempt {checkpoint.attempt_number} has saved step {checkpoint.step} anew as {anew}. Delete that one "
            "first, if this one is the better.",
            checkpoint_id=checkpoint.id,
            saved_anew=anew,
        )
