"""How a run fares, from its newest attempt: one rule, for one row and for a query."""

from __future__ import annotations

from sqlalchemy import ColumnElement, case

from holdfast_protocol.states import AttemptOutcome, RunStatus
from holdfast_service.catalog.tables import Attempt

_ENDED = {
    AttemptOutcome.FINISHED: RunStatus.FINISHED,
    AttemptOutcome.FAILED: RunStatus.FAILED,
    AttemptOutcome.PREEMPTED: RunStatus.PREEMPTED,
    AttemptOutcome.LOST: RunStatus.LOST,
}


def run_status() -> ColumnElement[str]:
    """Over `runs`, outer joined with their newest `attempts`."""
    return case(
        *((Attempt.outcome == outcome.value, status.value) for outcome, status in _ENDED.items()),
        (Attempt.stalled_at.is_not(None), RunStatus.STALLED.value),
        (Attempt.id.is_not(None) & Attempt.ended_at.is_(None), RunStatus.TRAINING.value),
        else_=RunStatus.IDLE.value,
    )


def status_detail(attempt: Attempt | None) -> str | None:
    """Why it is so, for people."""
    if attempt is None:
        return None
    if attempt.outcome is None and attempt.stalled_at is not None:
        return f"alive, and no progress since {attempt.stalled_at:%Y-%m-%d %H:%M:%S} UTC"
    if attempt.error_rank is not None:
        return f"rank {attempt.error_rank}: {attempt.outcome_detail}"
    return attempt.outcome_detail
