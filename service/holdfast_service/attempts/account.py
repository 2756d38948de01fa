"""What an attempt tells of itself, in a heartbeat or with its end, goes into its row."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from holdfast_protocol.attempts import Account
from holdfast_service.catalog.tables import Attempt
from holdfast_service.catalog.writing import reached

_LONGEST_AGE_SECONDS = 3650 * 86400.0


def take_account(session: Session, attempt: Attempt, told: Account, now: datetime) -> None:
    """The row is locked, or nobody else writes these columns meanwhile. What is older than what is known changes
    nothing: a request that was held up may arrive after a later one, and a rank may be behind another."""
    attempt.heartbeat_at = now
    if told.step is not None:
        reached(session, attempt, told.step)
    # A client of before protocol 1.3 tells no more than that.
    if told.steps_run is None or (attempt.steps_run is not None and told.steps_run < attempt.steps_run):
        return
    attempt.steps_run = told.steps_run
    if attempt.first_step is None and told.first_step is not None:
        attempt.first_step = told.first_step
        attempt.first_step_at = _ago(now, told.first_step_age_seconds, attempt.opened_at)
    if told.progress_age_seconds is not None:
        progressed_at = _ago(now, told.progress_age_seconds, attempt.opened_at)
        attempt.progressed_at = max(attempt.progressed_at or progressed_at, progressed_at)
    if told.steps_per_second is not None:
        attempt.steps_per_second = told.steps_per_second
    if told.restore_seconds is not None:
        attempt.restore_seconds = max(attempt.restore_seconds or 0.0, told.restore_seconds)
    if told.saves_begun is not None:
        attempt.saves_begun = max(attempt.saves_begun or 0, told.saves_begun)
    if told.save_blocked_seconds is not None:
        attempt.save_blocked_seconds = max(attempt.save_blocked_seconds or 0.0, told.save_blocked_seconds)
    attempt.doing = told.doing


def _ago(now: datetime, age_seconds: float | None, earliest: datetime) -> datetime:
    """Never before the attempt was opened: a process may have trained before, and clocks jump."""
    return max(earliest, now - timedelta(seconds=min(age_seconds or 0.0, _LONGEST_AGE_SECONDS)))
