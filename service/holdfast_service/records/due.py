"""Whose record is due, in a store that can be written now. What waits for a store that is away must not stand in the
way of what does not, so it is left out here and told in the backlog.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import exists, func, or_, select, text
from sqlalchemy.orm import Session

from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.record_names import RecordKind, Subject
from holdfast_service.catalog.record_tables import SUBJECT_TO_RECORD, RecordSubject, WrittenRecord
from holdfast_service.catalog.recorded import is_older
from holdfast_service.catalog.rounds import Backlog
from holdfast_service.catalog.tables import TO_RECORD, Checkpoint, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


def any_behind(session: Session) -> bool:
    """Whether anything is due at all, in whichever store."""
    subject = select(exists(select(RecordSubject.kind).where(text(SUBJECT_TO_RECORD))))
    checkpoint = select(exists(select(Checkpoint.id).where(text(TO_RECORD))))
    return bool(session.scalar(subject)) or bool(session.scalar(checkpoint))


def due_subjects(session: Session, stores: Sequence[AttachedStore], limit: int) -> list[Subject]:
    """Projects and runs first: a checkpoint's record names them."""
    now = database_now(session)
    rows = session.execute(
        select(RecordSubject.kind, RecordSubject.project_id, RecordSubject.subject_id)
        .where(
            text(SUBJECT_TO_RECORD),
            or_(
                *(
                    is_older(each, RecordSubject.kind, RecordSubject.subject_id, RecordSubject.version, now)
                    for each in stores
                )
            ),
        )
        .order_by(RecordSubject.kind, RecordSubject.subject_id)
        .limit(limit)
    ).all()
    found = [Subject(RecordKind(row.kind), row.project_id, row.subject_id) for row in rows]
    checkpoints = session.execute(
        select(Run.project_id, Checkpoint.id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(
            text(TO_RECORD),
            or_(*(is_older(each, RecordKind.CHECKPOINT, Checkpoint.id, Checkpoint.version, now) for each in stores)),
        )
        .order_by(Checkpoint.id)
        .limit(limit)
    ).all()
    return found + [Subject(RecordKind.CHECKPOINT, row.project_id, row.id) for row in checkpoints]


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """`oldest_due_at`: the commit of the oldest checkpoint that has no record at all."""
    subjects = session.scalar(select(func.count()).select_from(RecordSubject).where(text(SUBJECT_TO_RECORD))) or 0
    checkpoints = session.scalar(select(func.count()).select_from(Checkpoint).where(text(TO_RECORD))) or 0
    leased = session.scalar(
        select(func.count()).where(
            WrittenRecord.leased_until > database_now(session), WrittenRecord.removed_at.is_(None)
        )
    )
    oldest = session.scalar(
        select(func.min(Checkpoint.committed_at)).where(text(TO_RECORD), Checkpoint.recorded_version == 0)
    )
    return Backlog(due=subjects + checkpoints, leased=leased or 0, oldest_due_at=oldest)


def writable(stores: Collection[AttachedStore]) -> list[AttachedStore]:
    """Those that answer and are this catalog's in this epoch."""
    return [each for each in stores if not each.watch.away and each.watch.ownership.holds()]
