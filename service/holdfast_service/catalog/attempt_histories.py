"""What `attempt_time.py` wants to know of attempts, read for some runs at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import AttemptOutcome
from holdfast_service.catalog.attempt_time import AttemptHistory
from holdfast_service.catalog.tables import Attempt, Checkpoint


def attempt_histories(session: Session, run_ids: Collection[str]) -> dict[str, list[AttemptHistory]]:
    """By run, the oldest attempt first; a run without attempts is not in it."""
    rows = session.execute(
        select(Attempt, Checkpoint.attempt_number, Checkpoint.step)
        .outerjoin(Checkpoint, Checkpoint.id == Attempt.resumed_from_id)
        .where(Attempt.run_id.in_(run_ids))
        .order_by(Attempt.run_id, Attempt.number)
    )
    histories: dict[str, list[AttemptHistory]] = defaultdict(list)
    for attempt, resumed_attempt, resumed_step in rows:
        histories[attempt.run_id].append(
            AttemptHistory(
                number=attempt.number,
                opened_at=attempt.opened_at,
                outcome=None if attempt.outcome is None else AttemptOutcome(attempt.outcome),
                ended_at=attempt.ended_at,
                called_later=attempt.refused_at is not None or attempt.rolled_back_at is not None,
                heartbeat_at=attempt.heartbeat_at,
                first_step=attempt.first_step,
                first_step_at=attempt.first_step_at,
                last_step=attempt.last_step,
                progressed_at=attempt.progressed_at,
                steps_run=attempt.steps_run,
                steps_per_second=attempt.steps_per_second,
                restore_seconds=attempt.restore_seconds or 0.0,
                save_blocked_seconds=attempt.save_blocked_seconds or 0.0,
                resumed_from=None if resumed_step is None else (resumed_attempt, resumed_step),
                resumed_from_forgotten=attempt.resumed_from_id is not None and resumed_step is None,
            )
        )
    return dict(histories)
