"""The catalog against the records in one store, field by field (rules index-names-its-save, fencing-token and
record-outbox).

What never changes of a commit must be the same in every version of its record, and in its manifest. The rest must be
the same if record and row have the same version: what the service did not change keeps its version.

A missing, old or damaged record is made due again, and the outbox writes it; so is one of a fork that an older version
has written without its source. What the catalog does not know is only told: it is all that is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import null, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import ShardSummary
from holdfast_protocol.states import CheckpointState
from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.catalog_check.findings import Findings
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import Checkpoint, Run, Shard
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.records.content import checkpoint_record, gone_suffix, project_record, run_record
from holdfast_service.records.documents import (
    CheckpointFacts,
    CheckpointRecord,
    DamagedRecordError,
    HoldFacts,
    ListRecord,
    ManifestRecord,
    ProjectFacts,
    ProjectRecord,
    RecordKind,
    RunFacts,
    RunRecord,
    Subject,
)
from holdfast_service.records.scanning import FoundRecord, is_removed, read_record, scan_records
from holdfast_service.records.writing import RECORDED_STATES, is_always_recorded, is_subject

_LONGEST_SHOWN = 120
# With the version. Not what says where its chunks lie: that follows the copies.
_WITH_THE_VERSION = (
    "state",
    "health",
    "health_reason",
    "labels",
    "pinned_at",
    "pinned_by",
    "pin_reason",
    "pinned_until",
    "trashed_at",
    "trashed_by",
    "trash_reason",
    "purge_at",
)
# The store's own lock is told later, and by itself.
_OF_A_HOLD = tuple(name for name in HoldFacts.model_fields if name != "mirrored_at")


def subject_differences(
    session: Session, context: ServiceContext, document: ProjectRecord | RunRecord, version: int
) -> list[str]:
    """What differs, for a project or a run that the catalog has in this version."""
    fresh: ProjectRecord | RunRecord
    named: dict[str, tuple[Any, Any]] = {}
    if isinstance(document, ProjectRecord):
        fresh = project_record(session, context, document.project.id, version)
        changing: tuple[str, ...] = ("quota_bytes", "quotas", "policies")
    else:
        fresh = run_record(session, context, document.run.id, version)
        named["run"] = (_as_made(fresh.run), _as_made(document.run))
        changing = ("latest_attempt", "tags", "note", "forked_from")
    named["project"] = (_as_made(fresh.project), _as_made(document.project))
    if version == document.version:
        named |= {name: (getattr(fresh, name), getattr(document, name)) for name in changing}
    return list(_told(named))


def _as_made(named: ProjectFacts | RunFacts) -> tuple[str, str]:
    """The id, and the name without what a purge puts behind it: a run's record is not written again for what becomes
    of its project, and any record may be older than the purge."""
    return named.id, named.name.removesuffix(gone_suffix(named.id))


def checkpoint_differences(
    session: Session, context: ServiceContext, document: CheckpointRecord, manifest: ManifestRecord
) -> list[str]:
    """What differs, for a checkpoint that is committed or in the trash."""
    row = session.get(Checkpoint, document.checkpoint.id)
    if row is None or row.state not in RECORDED_STATES:
        return []
    fresh = checkpoint_record(session, context, row)
    found: dict[str, tuple[Any, Any]] = {}
    for record in (document, manifest):
        found |= _different(
            {
                "project": (fresh.project, record.project),
                "run": (fresh.run, record.run),
                "attempt of the launch": (fresh.attempt.number, record.attempt.number),
            }
            | {
                name: (getattr(fresh.checkpoint, name), getattr(record.checkpoint, name))
                # A record of an earlier version does not know them all.
                for name in CheckpointFacts.model_fields
                if name in record.checkpoint.model_fields_set and name != "metrics"
            }
        )
    sealed = {each.rank: each for each in session.scalars(select(Shard).where(Shard.checkpoint_id == row.id))}
    found["shards"] = (
        {rank: shard.digest for rank, shard in sealed.items()},
        {each.rank: each.digest for each in manifest.shards},
    )
    for each in manifest.shards:
        if (shard := sealed.get(each.rank)) is not None:
            found |= {
                f"{name} of rank {each.rank}": (getattr(shard.summary, name), getattr(each, name))
                for name in ShardSummary.model_fields
                if name in each.model_fields_set
            }
    if fresh.version == document.version:
        found |= {name: (getattr(fresh, name), getattr(document, name)) for name in _WITH_THE_VERSION}
        found["holds"] = (_holds(fresh.holds), _holds(document.holds))
        found["metrics"] = (fresh.checkpoint.metrics, document.checkpoint.metrics)
    return list(_told(found))


def _lacks_its_source(session: Session, document: CheckpointRecord, manifest: ManifestRecord) -> bool:
    """Whether it is a fork's, written by a worker from before revision 0037, which knew no forks: a rebuild would take
    the fork for its own run's, and no trainer could read it."""
    row = session.get(Checkpoint, document.checkpoint.id)
    if row is None or row.state not in RECORDED_STATES or row.forked_from is None:
        return False
    return any("forked_from" not in each.checkpoint.model_fields_set for each in (document, manifest))


def _holds(holds: list[HoldFacts]) -> dict[str, dict[str, Any]]:
    return {each.id: each.model_dump(include=set(_OF_A_HOLD)) for each in holds}


def _different(values: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _told(values: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, (here, there) in _different(values).items():
        yield f"{name} is {_short(here)} in the catalog and {_short(there)} in its record"


def _short(value: Any) -> str:
    text = "nothing" if value in (None, [], {}) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


_BATCH = 500
_MODELS: dict[RecordKind, type[ProjectRecord | RunRecord | CheckpointRecord]] = {
    RecordKind.PROJECT: ProjectRecord,
    RecordKind.RUN: RunRecord,
    RecordKind.CHECKPOINT: CheckpointRecord,
}
_GOING = (CheckpointState.DELETING, CheckpointState.DELETED)
# What differs, and in which fields if that can be told.
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
        if not known_by_now and not is_removed(attached.store, left):
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
    """How a subject that the catalog has stands in the store. The next pass writes what is due if the store `is_ours`;
    if not, only the catalog knows it, and it must not be thrown away unawares."""
    if known.state in _GOING:
        left = record is not None and record.versions and not is_removed(attached.store, record)
        return (FindingKind.LEFT_RECORDS, []) if left else _SAME
    if record is not None and is_removed(attached.store, record):
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
            if _lacks_its_source(session, document, manifest):
                return FindingKind.OLD_RECORDS, ["an older version has left out what it was forked from"]
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
    """A select: project, id, version, state (of a checkpoint), and the version that the store has; for one subject, or
    for the next few."""
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
