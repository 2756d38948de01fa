"""What the database that is replaced knows and no record says yet (rules record-outbox and rebuild-doubts).

Records are written after the commit, and not at all while a database that went back is looked at. So it may be the only
one that knows an acknowledged commit, or a newer state of one. Its records are made here, as the outbox would have
written them, and read with those beside the data. Nothing is written into the store: the rebuilt catalog does that once
it has adopted it.

The store counts if it says more: what was removed stays removed, and a database may have gone back behind a record.
Where both have gone on by themselves, what keeps a checkpoint counts: its state, its pin and its holds, each with the
later end. A hold that only the database knows counts beside a newer record, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, cast

from sqlalchemy import literal, select

from holdfast_protocol.states import CheckpointState
from holdfast_service.attached_stores.ownership import ForeignStoreError, read_marker
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity, Checkpoint, ChunkList, Run, Shard
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.db.tables.operations import Hold
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.sources import RebuildRefusedError
from holdfast_service.records.content import (
    checkpoint_record,
    list_record,
    manifest_record,
    project_record,
    run_record,
)
from holdfast_service.records.documents import (
    CheckpointRecord,
    DamagedRecordError,
    Document,
    HoldFacts,
    ProjectRecord,
    Record,
    RecordKind,
    RunRecord,
    Subject,
    encode,
)
from holdfast_service.records.scanning import FoundRecord, FoundRecords, is_removed, read_record
from holdfast_service.records.writing import RECORDED_STATES
from holdfast_service.stores.base import MOST_NAMED_BYTES, ObjectMissing, Store

_PIN = ("pinned_at", "pinned_by", "pin_reason", "pinned_until")
_TRASH = ("trashed_at", "trashed_by", "trash_reason", "purge_at")


@dataclass(frozen=True)
class _Author:
    """The catalog in whose name the records are made."""

    catalog_id: str
    epoch: int


@dataclass(frozen=True)
class _Known:
    subject: Subject
    version: int
    was_written: bool


def with_remembered(older: Database, url: str, store: Store, found: FoundRecords, report: RebuildReport) -> Store:
    """Adds to `found` what the older database knows better, and returns the store as it is to be read. No process may
    write into that database any more. Raises RebuildRefusedError, and StoreError."""
    with older.read() as session:
        identity = session.execute(select(CatalogIdentity)).scalar_one_or_none()
        if identity is None or identity.rebuilding_from is not None:
            raise RebuildRefusedError("--with-database names a database that holds no whole catalog. Leave it out.")
        author = _Author(identity.catalog_id, identity.epoch)
        store_id = _store_id(store) or session.scalar(select(StoreRow.id).where(StoreRow.url == url)) or 0
        held = set(session.scalars(select(Hold.checkpoint_id).distinct()))
    documents: dict[str, Callable[[], Document]] = {}
    for known in _known(older, store_id):
        there = found.by_subject.get(known.subject)
        newest = None if there is None else there.newest
        if there is not None and is_removed(store, there):
            continue
        if newest is None and known.was_written:
            if there is None and known.subject.kind is RecordKind.CHECKPOINT:
                report.notes.append(
                    f"{known.subject.folder}: the database that is replaced knows it, and its record is gone. It was "
                    "purged, or the record was deleted by hand; it is left out"
                )
            continue
        if there is not None and newest is not None and (newest[0] > author.epoch or newest[1] >= known.version):
            if known.subject.subject_id in held and (more := _with_new_holds(older, store, author, there)) is not None:
                there.versions.insert(0, (newest[0], more.version))
                there.remembered = True
                documents[str(there.newest_name)] = partial(_same, more)
                report.remembered.append(known.subject.folder)
            continue
        there = found.by_subject.setdefault(known.subject, FoundRecord(known.subject))
        name = known.subject.version_name(author.epoch, known.version)
        documents[name] = _version(older, store, author, known, there.newest_name)
        if newest is None and known.subject.kind is RecordKind.CHECKPOINT:
            documents |= _whole(older, author, known.subject)
            there.manifest = True
        there.versions.insert(0, (author.epoch, known.version))
        there.remembered = True
        report.remembered.append(known.subject.folder)
    return cast(Store, _Remembering(store, documents))


class _Remembering:
    """A store to which documents are added that are not in it."""

    def __init__(self, store: Store, documents: dict[str, Callable[[], Document]]) -> None:
        self._store = store
        self._documents = documents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_named(self, name: str, *, most_bytes: int = MOST_NAMED_BYTES) -> bytes:
        made = self._documents.get(name)
        return self._store.read_named(name, most_bytes=most_bytes) if made is None else encode(made())


def _store_id(store: Store) -> int | None:
    try:
        return read_marker(store).store_id
    except (ObjectMissing, ForeignStoreError):
        return None


def _known(older: Database, store_id: int) -> Iterator[_Known]:
    """Everything of which there is to be a record. `was_written`: this store has had one."""
    written = (WrittenRecord.store_id == store_id) & WrittenRecord.name.is_not(None)
    with older.read() as session:
        subjects = session.execute(
            select(
                RecordSubject.kind,
                RecordSubject.project_id,
                RecordSubject.subject_id.label("id"),
                RecordSubject.version,
                WrittenRecord.name,
            ).outerjoin(
                WrittenRecord,
                written
                & (WrittenRecord.kind == RecordSubject.kind)
                & (WrittenRecord.subject_id == RecordSubject.subject_id),
            )
        ).all()
        checkpoints = session.execute(
            select(
                literal(RecordKind.CHECKPOINT.value).label("kind"),
                Run.project_id,
                Checkpoint.id,
                Checkpoint.version,
                WrittenRecord.name,
            )
            .join(Run, Run.id == Checkpoint.run_id)
            .outerjoin(
                WrittenRecord,
                written & (WrittenRecord.kind == RecordKind.CHECKPOINT) & (WrittenRecord.subject_id == Checkpoint.id),
            )
            .where(Checkpoint.state.in_(RECORDED_STATES))
            .order_by(Checkpoint.id)
        ).all()
    for row in (*subjects, *checkpoints):
        yield _Known(Subject(RecordKind(row.kind), row.project_id, row.id), row.version, row.name is not None)


def _version(
    older: Database, store: Store, author: _Author, known: _Known, newest_name: str | None
) -> Callable[[], Document]:
    """What changes, as the database has it, beside what the store's newest record says."""
    subject = known.subject

    def theirs(model: type[Record]) -> Record | None:
        if newest_name is None:
            return None
        try:
            return read_record(store, newest_name, model)
        except DamagedRecordError:
            return None

    def make() -> Document:
        with older.read() as session:
            if subject.kind is RecordKind.PROJECT:
                return _project(
                    project_record(session, author, subject.subject_id, known.version), theirs(ProjectRecord)
                )
            if subject.kind is RecordKind.RUN:
                return _run(run_record(session, author, subject.subject_id, known.version), theirs(RunRecord))
            ours = checkpoint_record(session, author, session.get_one(Checkpoint, subject.subject_id))
            return _checkpoint(ours, theirs(CheckpointRecord))

    return make


def _with_new_holds(older: Database, store: Store, author: _Author, found: FoundRecord) -> CheckpointRecord | None:
    """The newest record of a checkpoint with the holds that only the database knows: no record ever leaves one out, so
    they were placed since the two have gone apart. None without such, or where the record cannot be read: then the
    rebuild places one itself."""
    try:
        theirs = read_record(store, str(found.newest_name), CheckpointRecord)
    except DamagedRecordError:
        return None
    with older.read() as session:
        checkpoint = session.get_one(Checkpoint, found.subject.subject_id)
        ours = checkpoint_record(session, author, checkpoint).holds
    known = {each.id for each in theirs.holds}
    new = [each for each in ours if each.id not in known]
    return theirs.model_copy(update={"version": theirs.version + 1, "holds": [*theirs.holds, *new]}) if new else None


def _same(document: Document) -> Document:
    return document


def _whole(older: Database, author: _Author, subject: Subject) -> dict[str, Callable[[], Document]]:
    """The manifest and the lists of a checkpoint that has none."""

    def manifest() -> Document:
        with older.read() as session:
            return manifest_record(session, author, session.get_one(Checkpoint, subject.subject_id))

    def a_list(list_id: int, digest: str) -> Document:
        with older.read() as session:
            return list_record(session, list_id, digest)

    with older.read() as session:
        lists = session.execute(
            select(ChunkList.id, ChunkList.digest)
            .join(Shard, Shard.chunk_list_id == ChunkList.id)
            .where(Shard.checkpoint_id == subject.subject_id)
            .distinct()
        ).all()
    documents: dict[str, Callable[[], Document]] = {subject.manifest_name: manifest}
    for row in lists:
        documents[subject.list_name(row.digest)] = partial(a_list, row.id, row.digest)
    return documents


def _project(ours: ProjectRecord, theirs: ProjectRecord | None) -> ProjectRecord:
    if theirs is not None and theirs.deletion is not None and theirs.deletion.purged_at is not None:
        return ours.model_copy(update={"deletion": theirs.deletion, "project": theirs.project})
    return ours


def _run(ours: RunRecord, theirs: RunRecord | None) -> RunRecord:
    if theirs is None:
        return ours
    if theirs.deletion is not None and theirs.deletion.purged_at is not None:
        return theirs.model_copy(update={"epoch": ours.epoch, "version": ours.version})
    attempts = {each.number: each for each in theirs.attempts}
    for each in ours.attempts:
        # The number may have been given anew since, to a launch that has committed.
        if attempts.setdefault(each.number, each).launch_id == each.launch_id:
            attempts[each.number] = each
    changes: dict[str, object] = {
        "attempts": list(attempts.values()),
        "latest_attempt": max(ours.latest_attempt, theirs.latest_attempt),
    }
    if not (ours.tags or ours.note):
        changes |= {"tags": theirs.tags, "note": theirs.note}
    return ours.model_copy(update=changes)


def _checkpoint(ours: CheckpointRecord, theirs: CheckpointRecord | None) -> CheckpointRecord:
    if theirs is None:
        return ours
    holds: dict[str, HoldFacts] = {}
    for each in (*theirs.holds, *ours.holds):
        known = holds.get(each.id)
        holds[each.id] = each if known is None else _longer(known, each)
    changes: dict[str, object] = {"holds": list(holds.values())}
    outlasts = theirs.pinned_at is not None and _is_later(theirs.pinned_until, ours.pinned_until)
    if ours.pinned_at is None or outlasts:
        changes |= {name: getattr(theirs, name) for name in _PIN}
    if theirs.state is CheckpointState.COMMITTED:
        changes |= {name: getattr(theirs, name) for name in ("state", *_TRASH)}
    return ours.model_copy(update=changes)


def _longer(theirs: HoldFacts, ours: HoldFacts) -> HoldFacts:
    """Of two states of one hold the one that is not released; of two such the one with the later end."""
    if (theirs.released_at is None) != (ours.released_at is None):
        return theirs if theirs.released_at is None else ours
    return theirs if _is_later(theirs.retain_until, ours.retain_until) else ours


def _is_later(end: datetime | None, other: datetime | None) -> bool:
    """None: there is no end."""
    return other is not None and (end is None or end > other)
