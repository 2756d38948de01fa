"""Takes a checkpoint's record away, for good and before any chunk of it goes (protocol rule 30).

A document that says `removed` is written first and outdoes all the others, so what a slow writer leaves later raises
nobody from the dead, and a crash between two steps leaves either a checkpoint in the trash with all of its bytes or one
that is gone. It goes itself when no write from before can come any more.
"""

from __future__ import annotations

from datetime import timedelta

import structlog
from sqlalchemy import Select, delete, select, update

from holdfast_protocol.states import CheckpointState, StoreRole
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.record_documents import RemovedRecord, encode
from holdfast_service.catalog.record_names import RecordKind, Subject, checkpoint_subject
from holdfast_service.catalog.record_tables import WrittenRecord
from holdfast_service.catalog.record_writing import is_subject
from holdfast_service.catalog.tables import Checkpoint, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import StoreError

# Far longer than a writer's lease: one that was suspended with its request half sent is long cut off.
_REMOVED_FOR = timedelta(days=1)
_GOING = (CheckpointState.DELETING, CheckpointState.DELETED)
_ROWS = 200

_log = structlog.get_logger("holdfast.records")


def remove_record(context: ServiceContext, project_id: str, checkpoint_id: str) -> None:
    """From every store that may have it, once the checkpoint is `deleting` for good. The primary store is told of one
    that was never recorded as well: an older copy of the database may know it. Repeatable.

    Raises StoreError where the primary store is away: then the checkpoint's chunks must stay. In another store that is
    away the removal stays due, and `remove_due_records` does it before anything is deleted there.
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
    """What `remove_record` could not do in this store; how many. Whoever deletes chunks in a store calls this first,
    and deletes nothing where it raises StoreError."""
    removed = 0
    while True:
        with context.database.read() as session:
            query = _written_in(attached).where(WrittenRecord.removed_at.is_(None), Checkpoint.state.in_(_GOING))
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
            WrittenRecord.removed_at < database_now(session) - _REMOVED_FOR, Checkpoint.state == CheckpointState.DELETED
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
    """(project, checkpoint) of the records that lie in this store, a round's share of them."""
    return (
        select(Run.project_id, Checkpoint.id)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(WrittenRecord, WrittenRecord.subject_id == Checkpoint.id)
        .where(WrittenRecord.kind == RecordKind.CHECKPOINT, WrittenRecord.store_id == attached.store_id)
        .limit(_ROWS)
    )


def _remove(context: ServiceContext, attached: AttachedStore, subject: Subject) -> None:
    attached.watch.newer_records.refuse()
    removed = RemovedRecord(catalog_id=context.catalog_id, checkpoint_id=subject.subject_id)
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
