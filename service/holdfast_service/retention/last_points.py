"""Whether a run can spare what is in its trash: it has two other points that are proven, now (protocol rule 39).

The plan counted them when it was made. By the time of the purge one may have been found bad, and what is in the trash
is what the run has left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, and_, exists, or_, select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.catalog.held import is_held
from holdfast_service.catalog.pinned import pin_in_force
from holdfast_service.catalog.proven import PROVEN_POINTS, newest_proven, proven_among
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.clock import database_now

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
    """Whether they are all ours to look at. Who finds a chunk bad locks each checkpoint that needs it, so while these
    are locked none of them gets worse. It waits for nobody: another order of locks would deadlock."""
    locked = session.scalars(
        select(Checkpoint.id).where(Checkpoint.id.in_(points)).with_for_update(read=True, skip_locked=True)
    ).all()
    return len(locked) == len(points)


def still_proven(session: Session, points: Collection[str]) -> bool:
    """Whether there are two of them yet, and each is as it was. Called after `lock_points`, in a later statement."""
    healthy = session.scalars(select(Checkpoint.id).where(Checkpoint.id.in_(points), _COUNTS)).all()
    return len(proven_among(session, healthy)) >= PROVEN_POINTS


def is_spare(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints` in the trash, where the run has fewer than two proven points: it may go nevertheless.

    What is diverged or in quarantine is no point. And nothing has to be kept for a run of which a person has deleted
    everything that they could.
    """
    other = aliased(Checkpoint)
    committed = and_(other.run_id == Checkpoint.run_id, other.state == CheckpointState.COMMITTED)
    free = and_(~is_held(session, other), ~pin_in_force(database_now(session), other))
    return or_(
        Checkpoint.health.not_in((Health.OK, Health.CORRUPT)),
        ~exists().where(committed),
        and_(Checkpoint.trashed_by == "person", ~exists().where(committed, free)),
    )
