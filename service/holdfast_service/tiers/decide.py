"""Writes down where each checkpoint belongs (`tier_wanted`), run by run. Only what has changed is written.

Where a policy is gone or has become milder, nothing is brought back: that costs money and time, and a person asks for
it (thaw). It only no longer gets colder.
"""

from __future__ import annotations

from sqlalchemy import exists, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.policies import PolicyKind
from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.custody_tables import Policy
from holdfast_service.catalog.tables import TO_COOL, Checkpoint, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.tiers.subjects import policy_of, subjects_of
from holdfast_service.tiers.wanted import wishes


def decide(context: ServiceContext) -> int:
    """How many checkpoints belong somewhere else than before."""
    with context.database.read() as session:
        runs = session.execute(
            select(Run.project_id, Run.id)
            .where(
                or_(
                    exists().where(Policy.project_id == Run.project_id, Policy.kind == PolicyKind.TIERS),
                    exists().where(Checkpoint.run_id == Run.id, text(TO_COOL)),
                )
            )
            .order_by(Run.id)
        ).all()
    changed = 0
    for project_id, run_id in runs:
        with context.database.read() as session:
            wanted = _changed(session, project_id, run_id)
        if wanted:
            with context.database.transaction() as session:
                _write(session, wanted)
            changed += len(wanted)
    return changed


def _changed(session: Session, project_id: str, run_id: str) -> dict[str, str | None]:
    now = database_now(session)
    _, policy = policy_of(session, project_id, run_id)
    subjects = subjects_of(session, run_id, now)
    found = wishes(policy, subjects, now)
    return {subject.id: found[subject.id].target for subject in subjects if subject.wanted != found[subject.id].target}


def _write(session: Session, wanted: dict[str, str | None]) -> None:
    for checkpoint_id, target in sorted(wanted.items()):
        session.execute(
            update(Checkpoint)
            .where(Checkpoint.id == checkpoint_id, Checkpoint.state == CheckpointState.COMMITTED)
            .values(tier_wanted=target, tier_checked_at=None),
            execution_options={"synchronize_session": False},
        )
