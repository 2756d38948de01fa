"""Writes the record of a checkpoint, a run or a project beside the data, and takes it away before the chunks go (rule
record-outbox).

    claim (a row in written_records, with a lease) -> write (no transaction) -> settle (only with that lease)

The service writes the record after the commit and after every change of state, health, labels, pin or hold: a catalog
that is rebuilt from the bucket then loses no commit. The lists come first, then the manifest that names them, then the
version that makes them count. The store itself refuses a write unless it is this catalog's in this epoch
(`stores.base.Store.guard_changes`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

import structlog
from sqlalchemy import ColumnElement, Select, delete, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, StoreRole
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import GOING, Checkpoint, ChunkList, Run, Shard
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.records.content import checkpoint_record, list_record, manifest_record, project_record, run_record
from holdfast_service.records.documents import (
    CheckpointRecord,
    ProjectRecord,
    RecordKind,
    RemovedRecord,
    RunRecord,
    Subject,
    checkpoint_subject,
    encode,
)
from holdfast_service.stores.base import StoreError

RECORDED_STATES = (CheckpointState.COMMITTED, CheckpointState.TRASHED)

_log = structlog.get_logger("holdfast.records")


@dataclass
class RecordTask:
    """A version that this process writes under a lease. `ends_at`: when the lease ends, by this process's monotonic
    clock; it moves while the process writes. The lease is short: if a process was killed, a commit does not wait
    long for its record. `whole`: the store has no manifest yet."""

    subject: Subject
    attached: AttachedStore
    record: ProjectRecord | RunRecord | CheckpointRecord
    older_name: str | None
    whole: bool
    lease_token: str
    ends_at: float

    @property
    def row(self) -> tuple[ColumnElement[bool], ...]:
        """Its row in `written_records`."""
        return (*is_subject(self.subject), WrittenRecord.store_id == self.attached.store_id)


class RecordLeaseOverError(Exception):
    """The write took longer than the lease, and another process has taken it over."""


def is_always_recorded(kind: RecordKind, role: StoreRole) -> bool:
    """Whether the store has a place in `written_records` without a request."""
    return role is StoreRole.PRIMARY or (kind is not RecordKind.CHECKPOINT and role is StoreRole.SECOND)


def claim_records(
    session: Session, context: ServiceContext, subject: Subject, writable: Collection[AttachedStore]
) -> list[RecordTask]:
    """One task per store that has an older version and is free of other processes' leases. Called in a transaction of
    its own."""
    record = _record(session, context, subject)
    if record is None:
        return []
    now = database_now(session)
    seconds = context.settings.lease_seconds
    ends_at = time.monotonic() + seconds
    stores = {each.store_id: each for each in writable}
    always = [each.store_id for each in writable if is_always_recorded(subject.kind, each.role)]
    insert_absent(session, WrittenRecord, [_key(subject) | {"store_id": each, "version": 0} for each in sorted(always)])
    rows = session.scalars(
        select(WrittenRecord)
        .where(
            *is_subject(subject),
            WrittenRecord.store_id.in_(stores),
            WrittenRecord.version < record.version,
            WrittenRecord.removed_at.is_(None),
            lease.is_free(WrittenRecord.leased_until, now),
        )
        .order_by(WrittenRecord.store_id)
        .with_for_update(skip_locked=True),
        execution_options={"populate_existing": True},
    ).all()
    return [
        RecordTask(
            subject,
            stores[row.store_id],
            record,
            row.name,
            row.version == 0,
            lease.claim_locked(session, row, seconds=seconds),
            ends_at,
        )
        for row in rows
    ]


def write_record(context: ServiceContext, task: RecordTask) -> None:
    """Outside of any transaction. Raises StoreError and RecordLeaseOverError."""
    if isinstance(task.record, CheckpointRecord) and task.whole:
        _write_manifest(context, task)
    _write(context, task, task.subject.version_name(task.record.epoch, task.record.version), encode(task.record))


def settle_record(context: ServiceContext, task: RecordTask) -> bool:
    """Whether the lease still was this process's. What was written before is taken away afterwards."""
    name = task.subject.version_name(task.record.epoch, task.record.version)
    with context.database.transaction() as session:
        version = task.record.version
        older = (*task.row, WrittenRecord.version < version)
        if not lease.give_back(session, WrittenRecord, task.lease_token, *older, version=version, name=name):
            return False
    if task.older_name not in (None, name):
        try:
            task.attached.store.delete_named(str(task.older_name))
        except StoreError as error:
            # It is outdone by the newer one, and goes with the folder at the latest.
            _log.info("an older record stays", name=task.older_name, error=str(error))
    return True


def let_go(context: ServiceContext, task: RecordTask) -> None:
    """Gives the lease back with nothing settled."""
    with context.database.transaction() as session:
        lease.give_back(session, WrittenRecord, task.lease_token, *task.row)


def is_subject(subject: Subject) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Over `written_records`."""
    return WrittenRecord.kind == subject.kind, WrittenRecord.subject_id == subject.subject_id


def _key(subject: Subject) -> dict[str, object]:
    return {"kind": subject.kind, "subject_id": subject.subject_id}


def _record(
    session: Session, context: ServiceContext, subject: Subject
) -> ProjectRecord | RunRecord | CheckpointRecord | None:
    """What the catalog says now; None if there is nothing to write any more."""
    if subject.kind is RecordKind.CHECKPOINT:
        # FOR KEY SHARE: a purge takes the row FOR UPDATE, and then either the purge sees the row that is made here, or
        # this sees that the checkpoint is going.
        checkpoint = session.scalar(
            select(Checkpoint)
            .where(Checkpoint.id == subject.subject_id, Checkpoint.state.in_(RECORDED_STATES))
            .with_for_update(read=True, key_share=True),
            execution_options={"populate_existing": True},
        )
        return None if checkpoint is None else checkpoint_record(session, context, checkpoint)
    version = session.scalar(
        select(RecordSubject.version).where(
            RecordSubject.kind == subject.kind, RecordSubject.subject_id == subject.subject_id
        )
    )
    if version is None:
        return None
    read = project_record if subject.kind is RecordKind.PROJECT else run_record
    return read(session, context, subject.subject_id, version)


def _write_manifest(context: ServiceContext, task: RecordTask) -> None:
    """One list at a time: a shard may have 200,000 chunks, and a checkpoint a thousand shards.

    A rebuild may have brought the checkpoint back without its shards: then what the store has is left as it is, for it
    may be whole."""
    with context.database.read() as session:
        checkpoint = session.get_one(Checkpoint, task.subject.subject_id)
        manifest = manifest_record(session, context, checkpoint)
        if len(manifest.shards) < checkpoint.world_size:
            return
        lists = session.execute(
            select(ChunkList.id, ChunkList.digest)
            .join(Shard, Shard.chunk_list_id == ChunkList.id)
            .where(Shard.checkpoint_id == checkpoint.id)
            .distinct()
        ).all()
    for list_id, digest in lists:
        with context.database.read() as session:
            document = list_record(session, list_id, digest)
        _write(context, task, task.subject.list_name(digest), encode(document))
    _write(context, task, task.subject.manifest_name, encode(manifest))


def _write(context: ServiceContext, task: RecordTask, name: str, data: bytes) -> None:
    if time.monotonic() > task.ends_at - context.settings.lease_seconds / 2:
        _renew(context, task, name)
    task.attached.store.write_named(name, data)


def _renew(context: ServiceContext, task: RecordTask, name: str) -> None:
    """Raises RecordLeaseOverError."""
    seconds = context.settings.lease_seconds
    ends_at = time.monotonic() + seconds
    with context.database.transaction() as session:
        if not lease.renew(session, WrittenRecord, task.lease_token, *task.row, seconds=seconds):
            raise RecordLeaseOverError(f"writing {name} took longer than its lease")
    task.ends_at = ends_at


# Far longer than a writer's lease: a suspended writer with a half-sent request is long cut off.
_REMOVED_FOR = timedelta(days=1)
_ROWS = 200


def remove_record(context: ServiceContext, project_id: str, checkpoint_id: str) -> None:
    """Takes a checkpoint's record away from every store that may have it, for good and before any chunk goes, once the
    checkpoint is `deleting` for good. The primary store is told of a checkpoint that was never recorded as well: an
    older copy of the database may know it. Repeatable.

    The service first writes a document that says `removed`, which outdoes all others of its epoch and before: a slow
    writer's late document then restores nothing, and a crash between two steps leaves either a checkpoint in the trash
    with all of its bytes or a checkpoint that is gone. The document itself goes when no earlier write can come any
    more.

    Raises StoreError if the primary store is unavailable: then the checkpoint's chunks must stay. In another
    unavailable store the removal stays due, and `remove_due_records` does it before anything is deleted there.
    """
    subject = checkpoint_subject(project_id, checkpoint_id)
    never_recorded = {"kind": subject.kind, "subject_id": checkpoint_id, "store_id": context.store_id, "version": 0}
    with context.database.transaction() as session:
        insert_absent(session, WrittenRecord, [never_recorded])
        due = set(
            session.scalars(
                select(WrittenRecord.store_id).where(*is_subject(subject), WrittenRecord.removed_at.is_(None))
            )
        )
    for attached in context.stores:
        if attached.store_id not in due:
            continue
        try:
            _remove(context, attached, subject)
        except StoreError as error:
            if attached.role is StoreRole.PRIMARY:
                raise
            _log.warning("a record is removed later", store=attached.role.value, name=subject.folder, error=str(error))


def remove_due_records(context: ServiceContext, attached: AttachedStore) -> int:
    """Does what `remove_record` could not do in this store; how many. A caller that deletes chunks in a store calls
    this first, and deletes nothing if it raises StoreError."""
    removed = 0
    while True:
        with context.database.read() as session:
            query = _written_in(attached).where(WrittenRecord.removed_at.is_(None), text(GOING))
            due = session.execute(query).all()
        for project_id, checkpoint_id in due:
            _remove(context, attached, checkpoint_subject(project_id, checkpoint_id))
        removed += len(due)
        if len(due) < _ROWS:
            return removed


def forget_removed(context: ServiceContext, attached: AttachedStore) -> int:
    """Takes away what says `removed`, a day later; how many. Raises StoreError."""
    with context.database.read() as session:
        query = _written_in(attached).where(
            WrittenRecord.removed_at < database_now(session) - _REMOVED_FOR,
            text(GOING),
            Checkpoint.state == CheckpointState.DELETED,
        )
        over = session.execute(query).all()
    for project_id, checkpoint_id in over:
        subject = checkpoint_subject(project_id, checkpoint_id)
        # The word itself last: until then it outdoes whatever else a late writer has left here.
        for name in sorted(attached.store.list_named(subject.folder), key=lambda name: name == subject.removed_name):
            attached.store.delete_named(name)
        with context.database.transaction() as session:
            session.execute(
                delete(WrittenRecord).where(*is_subject(subject), WrittenRecord.store_id == attached.store_id),
                execution_options={"synchronize_session": False},
            )
    return len(over)


def _written_in(attached: AttachedStore) -> Select[str, str]:
    """(project, checkpoint) of the records that lie in this store, a pass's share of them."""
    return (
        select(Run.project_id, Checkpoint.id)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(WrittenRecord, WrittenRecord.subject_id == Checkpoint.id)
        .where(WrittenRecord.kind == RecordKind.CHECKPOINT, WrittenRecord.store_id == attached.store_id)
        .limit(_ROWS)
    )


def _remove(context: ServiceContext, attached: AttachedStore, subject: Subject) -> None:
    attached.watch.newer_records.refuse()
    removed = RemovedRecord(catalog_id=context.catalog_id, epoch=context.epoch, checkpoint_id=subject.subject_id)
    attached.store.write_named(subject.removed_name, encode(removed))
    for name in list(attached.store.list_named(subject.folder)):
        if name != subject.removed_name:
            attached.store.delete_named(name)
    with context.database.transaction() as session:
        session.execute(
            update(WrittenRecord)
            .where(*is_subject(subject), WrittenRecord.store_id == attached.store_id)
            .values(removed_at=database_now(session)),
            execution_options={"synchronize_session": False},
        )
