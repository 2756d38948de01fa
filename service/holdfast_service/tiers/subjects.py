"""Reads what the policy judges of a run: its committed checkpoints, and what is in force about each."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.policies import PolicyError, PolicyKind, read_policy
from holdfast_protocol.states import CheckpointKind, CheckpointState, Health, Tier
from holdfast_protocol.tiers import TierPolicy
from holdfast_service.catalog.pinned import pin_in_force
from holdfast_service.catalog.policies import StoredPolicy, effective_policy
from holdfast_service.catalog.restore_choice import line_of_run
from holdfast_service.catalog.tables import Attempt, Checkpoint
from holdfast_service.tiers.wanted import Subject


def policy_of(session: Session, project_id: str, run_id: str) -> tuple[StoredPolicy | None, TierPolicy | None]:
    """The stored one, and as its model; a document that is none (of another version) moves nothing."""
    stored = effective_policy(session, PolicyKind.TIERS, project_id, run_id)
    if stored is None:
        return None, None
    try:
        policy = read_policy(PolicyKind.TIERS, stored.document)
    except PolicyError:
        return stored, None
    assert isinstance(policy, TierPolicy)
    return stored, policy


def subjects_of(session: Session, run_id: str, now: datetime) -> list[Subject]:
    """The newest step first."""
    line = line_of_run(session, run_id)
    resumed: dict[str, list[int]] = defaultdict(list)
    for checkpoint_id, number in session.execute(
        select(Attempt.resumed_from_id, Attempt.number)
        .where(Attempt.run_id == run_id, Attempt.ended_at.is_(None))
        .order_by(Attempt.number)
    ):
        if checkpoint_id is not None:
            resumed[checkpoint_id].append(number)
    rows = session.execute(
        select(
            Checkpoint.id,
            Checkpoint.step,
            Checkpoint.attempt_number,
            Checkpoint.kind,
            Checkpoint.labels,
            Checkpoint.committed_at,
            Checkpoint.health,
            Checkpoint.off_line,
            Checkpoint.tier,
            Checkpoint.tier_wanted,
            Checkpoint.tier_checked_at,
            pin_in_force(now).label("pinned"),
        )
        .where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.COMMITTED)
        .order_by(Checkpoint.step.desc(), Checkpoint.attempt_number.desc(), Checkpoint.id)
    )
    return [
        Subject(
            id=row.id,
            step=row.step,
            attempt=row.attempt_number,
            kind=CheckpointKind(row.kind),
            labels=row.labels,
            committed_at=row.committed_at,
            health=Health(row.health),
            on_line=not row.off_line and (row.attempt_number, row.step) in line,
            tier=Tier(row.tier),
            wanted=row.tier_wanted,
            settled=row.tier_checked_at is not None,
            pinned=bool(row.pinned),
            resumed_by=resumed.get(row.id, ()),
        )
        for row in rows
    ]
