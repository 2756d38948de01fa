"""What the events tell of an attempt: its restore and why no later one, its end, the end of its stall, and that it was
not lost after all.

Each is told in the transaction in which it happens (`events/announce.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.events import EventType
from holdfast_protocol.restores import RestoreDecision, skipped_in_words
from holdfast_protocol.states import AttemptOutcome
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Run
from holdfast_service.events.announce import announce

_ENDS = {
    AttemptOutcome.FAILED: EventType.ATTEMPT_FAILED,
    AttemptOutcome.PREEMPTED: EventType.ATTEMPT_PREEMPTED,
    AttemptOutcome.FINISHED: EventType.ATTEMPT_FINISHED,
}


def announce_end(session: Session, run: Run, attempt: Attempt, now: datetime) -> None:
    """Its own word. What others find out, `liveness/lost_attempts.py` tells."""
    event = _ENDS.get(AttemptOutcome(str(attempt.outcome)))
    if event is not None:
        announce(
            session,
            event,
            f"attempt {attempt.number} of {run.id}",
            now,
            project_id=run.project_id,
            run_id=run.id,
            attempt=attempt.number,
            step=attempt.last_step,
            reason=attempt.outcome_detail,
        )


_KEPT = 20
_LONGEST_DETAIL = 200


def kept_skipped(decision: RestoreDecision) -> list[dict[str, Any]]:
    """What an attempt's row keeps of the checkpoints that were skipped for it: bounded, for each run has many."""
    kept = [each.model_copy(update={"detail": each.detail[:_LONGEST_DETAIL]}) for each in decision.skipped[:_KEPT]]
    return [each.model_dump(mode="json") for each in kept]


def why_there(decision: RestoreDecision) -> str | None:
    """`skipped 1500 (aborted: disk full), 1400 (corrupt: a hole)`; None if the restore point is the newest."""
    skipped = skipped_in_words(decision.skipped)
    return f"skipped {skipped}" if skipped else None


def announce_restore(
    session: Session,
    run: Run,
    attempt: Attempt,
    event: EventType,
    *,
    checkpoint_id: str,
    step: int | None,
    reason: str | None = None,
) -> None:
    announce(
        session,
        event,
        f"attempt {attempt.number} of {run.id} from {checkpoint_id}",
        database_now(session),
        project_id=run.project_id,
        run_id=run.id,
        attempt=attempt.number,
        step=step,
        checkpoint_id=checkpoint_id,
        reason=reason,
    )


def end_stalls(session: Session, attempt_ids: Collection[int]) -> None:
    """The attempts have ended, and so has the stall of those that stood still: no later pass would tell so. Behind the
    statement that has ended them."""
    if not attempt_ids:
        return
    stalled = session.execute(
        select(Attempt, Run.project_id)
        .join(Run, Run.id == Attempt.run_id)
        .where(Attempt.id.in_(attempt_ids), Attempt.stalled_at.is_not(None))
        .order_by(Attempt.id),
        execution_options={"populate_existing": True},
    ).all()
    for attempt, project_id in stalled:
        attempt.stalled_at = None
        reason = f"its attempt has ended: {attempt.outcome}"
        _announce_state(session, EventType.RUN_GOES_ON, attempt, project_id, reason)


def announce_revival(session: Session, attempt: Attempt, project_id: str, reason: str) -> None:
    """It was called lost, and was not."""
    _announce_state(session, EventType.ATTEMPT_REVIVED, attempt, project_id, reason)


def _announce_state(session: Session, event: EventType, attempt: Attempt, project_id: str, reason: str) -> None:
    """Each time: an attempt can stall, or be called lost, more than once."""
    announce(
        session,
        event,
        None,
        database_now(session),
        project_id=project_id,
        run_id=attempt.run_id,
        attempt=attempt.number,
        step=attempt.last_step,
        reason=reason,
    )
