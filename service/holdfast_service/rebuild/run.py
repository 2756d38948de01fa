"""A rebuild from beginning to end, in an empty database: see the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from holdfast_protocol.text import without_secrets
from holdfast_service.db.engine import Database
from holdfast_service.rebuild.begin import begin, refuse_unless_rebuilding
from holdfast_service.rebuild.checkpoint_rows import ReadCheckpoint, put_checkpoint, read_checkpoint
from holdfast_service.rebuild.finish import (
    Parent,
    finish,
    mark_cold,
    mark_missing,
    settle_deletions,
    stand_in_for_purged,
)
from holdfast_service.rebuild.inventory import put_copies
from holdfast_service.rebuild.remembered import with_remembered
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.sources import (
    SourceStore,
    claim,
    leave_out_foreign,
    record_owners,
    refuse_foreign,
    usable_sources,
)
from holdfast_service.rebuild.subjects import put_project, put_run
from holdfast_service.records.documents import DamagedRecordError, ProjectRecord, RecordKind, RunRecord
from holdfast_service.records.scanning import FoundRecord, is_removed, read_record, scan_records
from holdfast_service.secrets.keyring import Keyring
from holdfast_service.stores.base import Store

# What is done, and how much of it there is if that is known.
Progress = Callable[[str, int, int | None], None]


def rebuild(
    database: Database,
    opened: Sequence[tuple[str, Store]],
    progress: Progress = lambda *_: None,
    *,
    catalog_id: str | None = None,
    may_mark: bool = False,
    older: Database | None = None,
    keyring: Keyring | None = None,
) -> RebuildReport:
    """`opened`: the store whose records are read, and then those in which copies are looked for too, each by its URL.
    `catalog_id`: a person's word on whose records to take, if the store's marker is lost or says another; with
    `may_mark` the store is then told that it is this catalog's, in the epoch of before. `older`: the database that is
    replaced, if it is still there. `keyring`: encrypts the catalog's new signing key.

    Repeatable after a kill at any point. Raises RebuildRefusedError, NewerRecordError, StoreError and
    ProblemError(`database_unavailable`).
    """
    report = RebuildReport()
    progress("looking for records", 0, None)
    (url, store), *others = opened
    found = scan_records(store)
    if older is not None:
        opened = [(url, with_remembered(older, url, store, found, report)), *others]
    owners = record_owners(opened[0][1], found)
    sources = usable_sources(opened, found, owners, report.notes, catalog_id)
    source = sources[0]
    foreign = leave_out_foreign(found, owners, source, report)
    begin(database, sources, keyring or Keyring())
    report.notes += [f"{name} is no record of Holdfast, and is left alone" for name in found.strange]
    parents: dict[str, Parent] = {}
    unsure: list[ReadCheckpoint] = []
    total = len(found.by_subject)
    for done, each in enumerate(found):
        progress("records", done, total)
        if each.subject.kind is RecordKind.PROJECT:
            _project(database, source, each, report)
        elif each.subject.kind is RecordKind.RUN:
            _run(database, source, each, report, parents)
        elif is_removed(source.store, each):
            report.removed += 1
        elif not each.says_anything:
            report.notes.append(f"{each.subject.folder}: its record was begun and not ended; nothing of it counts")
            report.doubt(each.subject.project_id, f"The record of {each.subject.subject_id} was begun and not ended.")
        else:
            read = read_checkpoint(sources, each, report)
            _note_parent(read, parents)
            if read.sure:
                _put(database, sources, read, report)
            else:
                unsure.append(read)
    for read in unsure:
        _put(database, sources, read, report)
    stand_in_for_purged(database, parents.values())
    settle_deletions(database, report)
    counted = 0

    def count(objects: int) -> None:
        nonlocal counted
        counted += objects
        progress("objects", counted, None)

    orphans: Counter[str] = Counter()
    for each_source in sources:
        orphans += put_copies(database, each_source, foreign, report, count)
    for project_id, number in sorted(orphans.items()):
        report.doubt(project_id, f"{number} objects in its stores belong to no checkpoint.")
    progress("looking for what is missing", 0, None)
    mark_missing(database)
    mark_cold(database)
    finish(database, report)
    if catalog_id is not None and may_mark:
        claim(source)
    if len(sources) == 1:
        report.notes.append(
            f"copies were looked for in {without_secrets(source.url)} alone. Set HOLDFAST_SECOND_STORE and "
            "HOLDFAST_COLD_STORE before the rebuild to have theirs too"
        )
    return report


def _put(database: Database, sources: Sequence[SourceStore], read: ReadCheckpoint, report: RebuildReport) -> None:
    """Raises StoreError."""
    subject = read.found.subject
    try:
        put_checkpoint(database, sources, read, report)
    except DamagedRecordError as error:
        report.damaged.append(f"{subject.folder}: {error}, so it is in no run")
        report.doubt(subject.project_id, f"The record of {subject.subject_id} contradicts others.")


def _project(database: Database, source: SourceStore, found: FoundRecord, report: RebuildReport) -> None:
    for version in found.versions:
        name = found.subject.version_name(*version)
        try:
            record = read_record(source.store, name, ProjectRecord)
            refuse_foreign(record, source)
            with database.transaction() as session:
                refuse_unless_rebuilding(session)
                put_project(session, record, source.marker.store_id, None if found.remembered else name)
        except DamagedRecordError as error:
            report.damaged.append(f"{name}: {error}; quota and policies of this project may be lost")
            continue
        return


def _run(
    database: Database, source: SourceStore, found: FoundRecord, report: RebuildReport, parents: dict[str, Parent]
) -> None:
    for version in found.versions:
        name = found.subject.version_name(*version)
        try:
            record = read_record(source.store, name, RunRecord)
            refuse_foreign(record, source)
            with database.transaction() as session:
                refuse_unless_rebuilding(session)
                put_run(session, record, source.marker.store_id, None if found.remembered else name)
        except DamagedRecordError as error:
            report.damaged.append(f"{name}: {error}; attempts of this run that committed nothing may be lost")
            report.doubt(found.subject.project_id, f"A record of the run {found.subject.subject_id} cannot be read.")
            continue
        for facts in record.attempts:
            if facts.resumed_from_id is not None and facts.resumed_from_step is not None:
                parents[facts.resumed_from_id] = Parent(record.run.id, facts)
        return


def _note_parent(read: ReadCheckpoint, parents: dict[str, Parent]) -> None:
    base = read.record or read.manifest
    if base is not None and base.attempt.resumed_from_id is not None and base.attempt.resumed_from_step is not None:
        parents.setdefault(base.attempt.resumed_from_id, Parent(base.run.id, base.attempt))
