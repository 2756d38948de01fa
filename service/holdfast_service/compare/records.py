"""The catalog against the records in one store. What is missing, old or damaged is made due again, and the outbox
writes it; what the catalog does not know is only told: it is all that is left of it (protocol rules 5 and 30).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import null, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState
from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.record_documents import (
    CheckpointRecord,
    DamagedRecordError,
    ListRecord,
    ManifestRecord,
    ProjectRecord,
    RunRecord,
)
from holdfast_service.catalog.record_names import RecordKind, Subject
from holdfast_service.catalog.record_scan import FoundRecord, read_record, scan_records
from holdfast_service.catalog.record_tables import RecordSubject, WrittenRecord
from holdfast_service.catalog.record_writing import RECORDED_STATES, is_always_recorded, is_subject
from holdfast_service.catalog.tables import Checkpoint, Run
from holdfast_service.compare.differences import checkpoint_differences, subject_differences
from holdfast_service.compare.findings import Findings
from holdfast_service.context import ServiceContext

_BATCH = 500
_MODELS: dict[RecordKind, type[ProjectRecord | RunRecord | CheckpointRecord]] = {
    RecordKind.PROJECT: ProjectRecord,
    RecordKind.RUN: RunRecord,
    RecordKind.CHECKPOINT: CheckpointRecord,
}
_GOING = (CheckpointState.DELETING, CheckpointState.DELETED)
# What differs, and in which fields where that can be told.
_Difference = tuple[FindingKind | None, list[str]]
_SAME: _Difference = (None, [])


@dataclass(frozen=True)
class _Known:
    """What the catalog has: the subject's version, its state if it is a checkpoint, and what it thinks of the store's
    record: the version there, None if it never asked for one."""

    version: int
    state: str | None
    written: int | None


def compare_records(
    context: ServiceContext,
    attached: AttachedStore,
    findings: Findings,
    on_step: Callable[[int], None],
    *,
    deep: bool,
) -> int:
    """How many subjects have a record there. Raises StoreError and NewerRecordError."""
    is_ours = attached.watch.ownership.holds()
    found = scan_records(attached.store, on_name=lambda: on_step(0))
    records = len(found.by_subject)
    for name in found.strange:
        findings.add(FindingKind.FOREIGN_RECORDS, name)
    for subject, known in _catalog(context, attached.store_id):
        record = found.by_subject.pop(subject, None)
        kind, details = _difference(context, attached, record, known, is_ours=is_ours, deep=deep)
        if kind is not None:
            # Again, both sides anew: the outbox may have been at it since the names were listed.
            record = scan_records(attached.store, subject.folder).by_subject.get(subject)
            with context.database.read() as session:
                now = _known(session, attached.store_id, subject)
            kind, details = (
                _SAME if now is None else _difference(context, attached, record, now, is_ours=is_ours, deep=deep)
            )
        if kind is not None:
            for detail in details:
                findings.add(kind, f"{subject.folder}: {detail}")
            if not details:
                findings.add(kind, subject.folder)
            _mend(context, attached.store_id, subject, kind)
        on_step(1)
    for left in found:
        with context.database.read() as session:
            # Made since the catalog was read.
            known_by_now = _known(session, attached.store_id, left.subject) is not None
        if not left.removed and not known_by_now:
            unknown = _kind_of_unknown(context, attached, left) if left.says_anything else FindingKind.BEGUN_RECORDS
            findings.add(unknown, left.subject.folder)
        on_step(1)
    return records


def _difference(
    context: ServiceContext,
    attached: AttachedStore,
    record: FoundRecord | None,
    known: _Known,
    *,
    is_ours: bool,
    deep: bool,
) -> _Difference:
    """How a subject that the catalog has stands in the store. What is due is written in the next round if the store
    `is_ours`; if not, only the catalog knows it, and nobody may throw that away unawares."""
    if known.state in _GOING:
        left = record is not None and not record.removed and record.versions
        return (FindingKind.LEFT_RECORDS, []) if left else _SAME
    if record is not None and record.removed:
        return FindingKind.REMOVED_RECORDS, []
    newest = None if record is None else record.newest
    if newest is not None and (newest[0] > context.epoch or newest[1] > known.version):
        return FindingKind.NEWER_RECORDS, []
    if not known.written and newest is None:
        kind = RecordKind.RUN if known.state is None else RecordKind.CHECKPOINT
        is_wanted = known.written is not None or is_always_recorded(kind, attached.role)
        return (FindingKind.UNRECORDED, []) if is_wanted and not is_ours else _SAME
    if record is None or newest is None:
        return FindingKind.MISSING_RECORDS, []
    if newest[1] < (known.written or 0):
        return FindingKind.OLD_RECORDS, []
    try:
        different = _content(context, attached, record, deep=deep)
        is_outdated = newest[1] < known.version and not is_ours
        return (FindingKind.OUTDATED_RECORDS, []) if different == _SAME and is_outdated else different
    except DamagedRecordError:
        # What is due is outdone anyway.
        return (FindingKind.DAMAGED_RECORDS, []) if known.written else _SAME


def _content(context: ServiceContext, attached: AttachedStore, record: FoundRecord, *, deep: bool) -> _Difference:
    """Whose the newest document is, and whether it says what the catalog says. Raises DamagedRecordError."""
    document = read_record(attached.store, str(record.newest_name), _MODELS[record.subject.kind])
    if document.catalog_id != context.catalog_id:
        return FindingKind.FOREIGN_RECORDS, []
    if isinstance(document, CheckpointRecord):
        manifest = _read_manifest(attached, record.subject, deep=deep)
        if document.checkpoint.id != record.subject.subject_id:
            raise DamagedRecordError("it is another checkpoint's")
        with context.database.read() as session:
            details = checkpoint_differences(session, context, document, manifest)
    else:
        with context.database.read() as session:
            subject = session.get(RecordSubject, (record.subject.kind, record.subject.subject_id))
            details = [] if subject is None else subject_differences(session, context, document, subject.version)
    return (FindingKind.DIFFERENT_RECORDS, details) if details else _SAME


def _read_manifest(attached: AttachedStore, subject: Subject, *, deep: bool) -> ManifestRecord:
    manifest = read_record(attached.store, subject.manifest_name, ManifestRecord)
    for digest in sorted({shard.digest for shard in manifest.shards}) if deep else ():
        read_record(attached.store, subject.list_name(digest), ListRecord)
    return manifest


def _kind_of_unknown(context: ServiceContext, attached: AttachedStore, record: FoundRecord) -> FindingKind:
    try:
        document = read_record(attached.store, str(record.newest_name), _MODELS[record.subject.kind])
    except (DamagedRecordError, ValueError):
        return FindingKind.UNKNOWN_RECORDS
    ours = document.catalog_id == context.catalog_id
    return FindingKind.UNKNOWN_RECORDS if ours else FindingKind.FOREIGN_RECORDS


def _known(session: Session, store_id: int, subject: Subject) -> _Known | None:
    rows = session.execute(_statement(subject.kind, store_id, is_one=subject.subject_id)).all()
    return _Known(rows[0].version, rows[0].state, rows[0].written) if rows else None


def _catalog(context: ServiceContext, store_id: int) -> Iterator[tuple[Subject, _Known]]:
    """Everything of which there may be a record, a portion at a time."""
    for kind in RecordKind:
        last = ""
        while True:
            with context.database.read() as session:
                rows = session.execute(_statement(kind, store_id, after=last)).all()
            for row in rows:
                yield Subject(kind, row.project_id, row.id), _Known(row.version, row.state, row.written)
            if len(rows) < _BATCH:
                break
            last = rows[-1].id


def _statement(kind: RecordKind, store_id: int, *, after: str = "", is_one: str | None = None) -> Any:
    """A select: project, id, version, state (of a checkpoint), and the version that the store has. Of one, or of the
    next few."""
    written = (WrittenRecord.kind == kind) & (WrittenRecord.store_id == store_id)
    statement: Any
    if kind is RecordKind.CHECKPOINT:
        key = Checkpoint.id
        statement = (
            select(
                Run.project_id,
                key.label("id"),
                Checkpoint.version,
                Checkpoint.state,
                WrittenRecord.version.label("written"),
            )
            .join(Run, Run.id == Checkpoint.run_id)
            .outerjoin(WrittenRecord, written & (WrittenRecord.subject_id == key))
            .where(Checkpoint.state.in_((*RECORDED_STATES, *_GOING)))
        )
    else:
        key = RecordSubject.subject_id
        statement = (
            select(
                RecordSubject.project_id,
                key.label("id"),
                RecordSubject.version,
                null().label("state"),
                WrittenRecord.version.label("written"),
            )
            .outerjoin(WrittenRecord, written & (WrittenRecord.subject_id == key))
            .where(RecordSubject.kind == kind)
        )
    statement = statement.where(key > after) if is_one is None else statement.where(key == is_one)
    return statement.order_by(key).limit(_BATCH)


def _mend(context: ServiceContext, store_id: int, subject: Subject, kind: FindingKind) -> None:
    """Makes due what the outbox can put right."""
    if kind not in {
        FindingKind.MISSING_RECORDS,
        FindingKind.OLD_RECORDS,
        FindingKind.DAMAGED_RECORDS,
        FindingKind.LEFT_RECORDS,
    }:
        return
    unsynchronized = {"synchronize_session": False}
    with context.database.transaction() as session:
        row = {"kind": subject.kind, "subject_id": subject.subject_id, "store_id": store_id, "version": 0}
        insert_absent(session, WrittenRecord, [row])
        session.execute(
            update(WrittenRecord)
            .where(*is_subject(subject), WrittenRecord.store_id == store_id)
            .values(version=0, removed_at=None),
            execution_options=unsynchronized,
        )
        if subject.kind is RecordKind.CHECKPOINT:
            session.execute(
                update(Checkpoint).where(Checkpoint.id == subject.subject_id).values(recorded_version=0),
                execution_options=unsynchronized,
            )
            return
        session.execute(
            update(RecordSubject)
            .where(RecordSubject.kind == subject.kind, RecordSubject.subject_id == subject.subject_id)
            .values(recorded_version=0),
            execution_options=unsynchronized,
        )
