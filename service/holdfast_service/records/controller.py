"""The controller `records`: every record that is due is written, in each store that can be written now."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from sqlalchemy import exists, func, or_, select, text
from sqlalchemy.orm import Session

from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import TO_RECORD, Checkpoint, Run
from holdfast_service.db.tables.records import SUBJECT_TO_RECORD, RecordSubject, WrittenRecord
from holdfast_service.errors import ProblemError
from holdfast_service.records.documents import RecordKind, Subject
from holdfast_service.records.outbox import is_older, note_recorded
from holdfast_service.records.writing import (
    RecordLeaseOverError,
    claim_records,
    forget_removed,
    let_go,
    remove_due_records,
    settle_record,
    write_record,
)
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreError
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport, counted


def any_behind(session: Session) -> bool:
    """Whether anything is due at all, in whichever store."""
    subject = select(exists(select(RecordSubject.kind).where(text(SUBJECT_TO_RECORD))))
    checkpoint = select(exists(select(Checkpoint.id).where(text(TO_RECORD))))
    return bool(session.scalar(subject)) or bool(session.scalar(checkpoint))


def due_subjects(session: Session, stores: Sequence[AttachedStore], limit: int) -> list[Subject]:
    """Whose record is due in a store that can be written now. Projects and runs first: a checkpoint's record names
    them. What waits for an unavailable store must not delay the rest: it is left out here and told in the backlog."""
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
    subjects = counted(session, select(RecordSubject.subject_id).where(text(SUBJECT_TO_RECORD)))
    checkpoints = counted(session, select(Checkpoint.id).where(text(TO_RECORD)))
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
    return [each for each in stores if not each.watch.unavailable and each.watch.ownership.holds()]


_SUBJECTS_PER_ROUND = 500

_log = structlog.get_logger("holdfast.records")


@dataclass(frozen=True, kw_only=True)
class RecordsReport(ReconcileReport):
    """`removed`: records of checkpoints that are going, which a store that was unavailable still had."""

    removed: int = 0


def reconcile(context: ServiceContext) -> RecordsReport:
    """One pass of the outbox: writes every due record in each store that can be written (rule record-outbox). A store
    that is unavailable, or is not this catalog's, keeps its records due.

    Any number of processes share the work, a claim at a time. A version whose writer was killed is written again; a
    version that is written twice or late stands under its own name, and the newest counts.
    """
    stores = writable(context.stores)
    if not stores:
        return RecordsReport()
    done = failed = removed = 0
    error: str | None = None
    with context.database.read() as session:
        behind = any_behind(session)
        subjects = due_subjects(session, stores, _SUBJECTS_PER_ROUND) if behind else []
    for subject in subjects:
        if context.stopping.is_set():
            break
        written, refusal = _write(context, subject, stores)
        done, failed, error = done + written, failed + (refusal is not None), refusal or error
    if behind:
        context.database.run(lambda session: note_recorded(session, context))
    for attached in stores:
        try:
            removed += remove_due_records(context, attached)
            forget_removed(context, attached)
        except StoreError as refused:
            failed, error = failed + 1, str(refused)
    return RecordsReport(done=done + removed, failed=failed, error=error, removed=removed)


_AT_ONCE_SECONDS = 5.0


def write_at_once(context: ServiceContext, subjects: Sequence[Subject]) -> None:
    """Outside of any transaction, for a change that must not wait for the next pass: until then a rebuild would undo
    it. The first ones alone, as many as there is time for: somebody waits. What is not written now stays due, and
    nothing is raised."""
    stores, until = writable(context.stores), time.monotonic() + _AT_ONCE_SECONDS
    for subject in subjects if stores else ():
        if context.stopping.is_set() or time.monotonic() >= until:
            return
        try:
            _, refusal = _write(context, subject, stores)
        except ProblemError as error:
            refusal = error.detail
        if refusal is not None:
            _log.info("records are left to the next pass", record=subject.folder, error=refusal)
            return


def _write(context: ServiceContext, subject: Subject, stores: Collection[AttachedStore]) -> tuple[int, str | None]:
    """How many versions were written, and why one was not."""
    with context.database.transaction() as session:
        tasks = claim_records(session, context, subject, stores)
    written, refusal = 0, None
    for position, task in enumerate(tasks):
        try:
            try:
                write_record(context, task)
            except (StoreError, RecordLeaseOverError) as error:
                let_go(context, task)
                refusal = str(error)
                _log.warning("a record stays due", record=subject.folder, store=task.attached.role.value, error=refusal)
            else:
                written += settle_record(context, task)
        except ProblemError:
            # A connection was lost in the middle. What this process does not write must not wait for its lease's end.
            for claimed in tasks[position:]:
                with suppress(ProblemError):
                    let_go(context, claimed)
            raise
    return written, refusal


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop("records", settings.controller_interval_seconds, reconcile, backlog),)
