"""One round of the outbox: every record that is due is written, in each store that can be written (protocol rule 30).

Any number of processes share the work, a claim at a time. Killed between two steps, a version is written again; done
twice or late, it stands under its own name and the newest counts.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import structlog

from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.commit_records import forget_removed, remove_due_records
from holdfast_service.catalog.record_names import Subject
from holdfast_service.catalog.record_writing import (
    RecordLeaseOverError,
    claim_records,
    let_go,
    settle_record,
    write_record,
)
from holdfast_service.catalog.recorded import note_recorded
from holdfast_service.catalog.rounds import RoundReport
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.records.due import any_behind, due_subjects, writable
from holdfast_service.stores.base import StoreError

_SUBJECTS_PER_ROUND = 500

_log = structlog.get_logger("holdfast.records")


@dataclass(frozen=True, kw_only=True)
class RecordsReport(RoundReport):
    """`removed`: records of checkpoints that are going, which a store that was away still had."""

    removed: int = 0


def tick(context: ServiceContext) -> RecordsReport:
    """A store that is away, or is not this catalog's, keeps its records due."""
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
        with context.database.transaction() as session:
            note_recorded(session, context)
    for attached in stores:
        try:
            removed += remove_due_records(context, attached)
            forget_removed(context, attached)
        except StoreError as refused:
            failed, error = failed + 1, str(refused)
    return RecordsReport(done=done + removed, failed=failed, error=error, removed=removed)


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
