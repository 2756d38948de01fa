"""The crash-loop breaker: opening an attempt does not offer once more what the last ones have all crashed from.

In the transaction of the opening, under the run's lock: of two launches at once only one looks, and the other one sees
what came of it. `crash_loop.py` decides; a person's release counts the attempts anew.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.restore import RestoreDecision, RestorePoint
from holdfast_protocol.selectors import Latest
from holdfast_protocol.states import AttemptOutcome, CheckpointState, Health
from holdfast_service.attempts.crash_loop import IN_A_ROW, CrashLoop, Tried, crash_loop
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import AuditEvent
from holdfast_service.catalog.reach import Reach
from holdfast_service.catalog.resolve import locked_checkpoint
from holdfast_service.catalog.restore_choice import choose_restore_point
from holdfast_service.catalog.tables import Attempt, Checkpoint, Run

_LOOKED_AT = 100
"""Attempts, from the newest back."""


def break_crash_loop(
    session: Session, run: Run, decision: RestoreDecision, *, attempts: int, reach: Reach | None
) -> RestoreDecision:
    """`decision`, or the one that comes after a quarantine, with a note for people either way. One checkpoint at most,
    never the last one that is left, and only IN_A_ROW of them until an attempt makes progress. `attempts`: as the
    setting, 0 for never."""
    point = decision.restore_point
    if point is None or attempts == 0:
        return decision
    loop = crash_loop(
        _tried(session, run), point.checkpoint_id, attempts=attempts, released_at=_released_at(session, point)
    )
    if loop is None:
        return decision
    told = f"Attempts {', '.join(map(str, loop.attempts))} crashed from step {point.step} without progress"
    if len(_quarantined(session, loop)) >= IN_A_ROW:
        return _noted(
            decision,
            f"{told}, as others did from the checkpoints in quarantine before it. So the job seems to be at fault, and "
            "no further checkpoint is passed over. Mend it; `holdfast health` releases the newer checkpoints.",
        )
    before = choose_restore_point(session, run.id, Latest(), before_step=point.step, reach=reach)
    if before.restore_point is None:
        return _noted(decision, f"{told}. It is offered all the same, for no other healthy checkpoint is left.")
    if not _quarantine(session, run, point, told):
        return decision
    after = choose_restore_point(session, run.id, Latest(), reach=reach)
    return _noted(
        after,
        f"{told}: it is in quarantine, and the one before is offered. `holdfast health` releases it, should it not "
        "have been at fault.",
    )


def _noted(decision: RestoreDecision, sentence: str) -> RestoreDecision:
    return decision.model_copy(update={"note": f"{decision.note} {sentence}".strip()})


def _tried(session: Session, run: Run) -> list[Tried]:
    """The attempts before the one that is being opened, the newest first."""
    committed = set(
        session.scalars(
            select(Checkpoint.attempt_number)
            .where(
                Checkpoint.run_id == run.id,
                Checkpoint.attempt_number >= run.latest_attempt - _LOOKED_AT,
                Checkpoint.committed_at.is_not(None),
                ~Checkpoint.off_line,
                # Saved by a bad restore point, it would hide the crashes that come of it.
                Checkpoint.health != Health.DIVERGED,
            )
            .distinct()
        )
    )
    point = aliased(Checkpoint)
    rows = session.execute(
        select(Attempt, point.id, point.step)
        .outerjoin(point, point.id == func.coalesce(Attempt.resumed_from_id, Attempt.offered_id))
        .where(Attempt.run_id == run.id, Attempt.number < run.latest_attempt)
        .order_by(Attempt.number.desc())
        .limit(_LOOKED_AT),
        execution_options={"populate_existing": True},
    )
    return [
        Tried(
            number=attempt.number,
            opened_at=attempt.opened_at,
            point=point_id,
            point_step=point_step,
            outcome=None if attempt.outcome is None else AttemptOutcome(attempt.outcome),
            error_type=attempt.error_type,
            last_step=attempt.last_step,
            committed=attempt.number in committed,
            rolled_back=attempt.rolled_back_at is not None,
            called_later=attempt.refused_at is not None,
        )
        for attempt, point_id, point_step in rows
    ]


def _released_at(session: Session, point: RestorePoint) -> datetime | None:
    """When a person last said that it is healthy."""
    edits = session.scalars(
        select(AuditEvent)
        .where(AuditEvent.checkpoint_id == point.checkpoint_id, AuditEvent.action == "checkpoint.edit")
        .order_by(AuditEvent.id.desc())
    )
    return next((edit.at for edit in edits if (edit.after or {}).get("health") == Health.OK), None)


def _quarantined(session: Session, loop: CrashLoop) -> list[str]:
    """Of the other points that the job crashed from."""
    return list(
        session.scalars(
            select(Checkpoint.id).where(Checkpoint.id.in_(loop.others), Checkpoint.health == Health.QUARANTINED)
        )
    )


def _quarantine(session: Session, run: Run, point: RestorePoint, reason: str) -> bool:
    """False where it has changed since it was chosen: an edit takes only the checkpoint's lock."""
    checkpoint = locked_checkpoint(session, point.checkpoint_id)
    if (checkpoint.state, checkpoint.health) != (CheckpointState.COMMITTED, Health.OK):
        return False
    checkpoint.health = Health.QUARANTINED
    checkpoint.health_reason = reason
    checkpoint.version += 1
    record_event(
        session,
        Actor.controller("crash-loop"),
        "checkpoint.quarantine",
        project_id=run.project_id,
        run_id=run.id,
        checkpoint_id=checkpoint.id,
        reason=reason,
        before={"health": Health.OK.value},
        after={"health": Health.QUARANTINED.value, "health_reason": reason},
    )
    session.flush()
    return True
