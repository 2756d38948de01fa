"""Which records are due, and in which store the newest one is known to be (rule record-outbox).

Every change that a rebuilt catalog must know makes a record due. A checkpoint is due while its `recorded_version` is
behind its `version`; a project or a run by its row in `record_subjects`. The change's own transaction writes either: no
commit is without its record for longer than a pass of the controller `records`.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import TO_RECORD, Checkpoint
from holdfast_service.db.tables.records import SUBJECT_TO_RECORD, RecordSubject, WrittenRecord
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.writing import is_always_recorded

_LOCKED_AT_ONCE = 1000


def subject_changed(session: Session, kind: RecordKind, subject_id: str, project_id: str) -> None:
    """A project's quota or a policy of it, or an attempt of a run. Called last in a transaction: the row stays locked
    until its end."""
    row = _row(kind, subject_id, project_id)
    raised = {"version": RecordSubject.version + 1}
    keys = ("kind", "subject_id")
    if session.get_bind().dialect.name == "postgresql":
        session.execute(
            postgresql.insert(RecordSubject).values(row).on_conflict_do_update(index_elements=keys, set_=raised)
        )
    else:
        session.execute(
            sqlite.insert(RecordSubject).values(row).on_conflict_do_update(index_elements=keys, set_=raised)
        )


def record_in_store(session: Session, checkpoint_id: str, store_id: int) -> None:
    """The checkpoint is whole in a store beside the primary one: from now on its record is kept there too. Said again,
    it changes nothing. Takes the checkpoint's lock."""
    session.execute(select(Checkpoint.id).where(Checkpoint.id == checkpoint_id).with_for_update(key_share=True)).all()
    wanted = {"kind": RecordKind.CHECKPOINT, "subject_id": checkpoint_id, "store_id": store_id, "version": 0}
    insert_absent(session, WrittenRecord, [wanted])
    written = select(func.min(WrittenRecord.version)).where(
        WrittenRecord.kind == RecordKind.CHECKPOINT, WrittenRecord.subject_id == checkpoint_id
    )
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.recorded_version > written.scalar_subquery())
        .values(recorded_version=0),
        execution_options={"synchronize_session": False},
    )


def _row(kind: RecordKind, subject_id: str, project_id: str) -> dict[str, object]:
    return {"kind": kind, "subject_id": subject_id, "project_id": project_id, "version": 1, "recorded_version": 0}


# What has records, its kind and key, and what is due of it. Checkpoints first: whoever changes one locks it, and calls
# `subject_changed` last.
_RECORDED = (
    (Checkpoint, RecordKind.CHECKPOINT, Checkpoint.id, TO_RECORD),
    (RecordSubject, RecordSubject.kind, RecordSubject.subject_id, SUBJECT_TO_RECORD),
)


def note_recorded(session: Session, context: ServiceContext) -> None:
    """A subject whose newest version every attached store has is due no more, until a store is attached that lacks it.
    Asked of the rows: the answer does not depend on which process wrote last. Repeatable."""
    for table, kind, key, behind in _RECORDED:
        older = [is_older(each, kind, key, table.version) for each in context.stores]
        done = and_(text(behind), ~or_(*older))
        noted = update(table).values(recorded_version=table.version)
        options = {"synchronize_session": False}
        if table is RecordSubject:
            session.execute(noted.where(done), execution_options=options)
            continue
        # Locked, and asked again by a later statement: `record_in_store` may just add a store to one of them, and a
        # statement that began before sees no row of it.
        free = select(Checkpoint.id).where(done).with_for_update(key_share=True, skip_locked=True)
        while ids := session.scalars(free.limit(_LOCKED_AT_ONCE)).all():
            session.execute(noted.where(done, Checkpoint.id.in_(ids)), execution_options=options)


def due_since_attached(session: Session, context: ServiceContext) -> None:
    """At the start of a process: what all attached stores had was due no more, and one that is attached only now may
    have an older record, or none. It is due again."""
    for table, kind, key, _ in _RECORDED:
        for each in context.stores:
            session.execute(
                update(table)
                .where(table.recorded_version >= table.version, is_older(each, kind, key, table.version))
                .values(recorded_version=0),
                execution_options={"synchronize_session": False},
            )


def is_older(
    attached: AttachedStore,
    kind: RecordKind | InstrumentedAttribute[str],
    subject_id: InstrumentedAttribute[str],
    version: InstrumentedAttribute[int],
    now: datetime | None = None,
) -> ColumnElement[bool]:
    """Whether this store is to have a record of the subject and has an older one; with `now`, whether no process writes
    it at the moment, too."""
    theirs = and_(
        WrittenRecord.kind == kind,
        WrittenRecord.subject_id == subject_id,
        WrittenRecord.store_id == attached.store_id,
    )
    done = or_(WrittenRecord.version >= version, WrittenRecord.removed_at.is_not(None))
    if now is not None:
        done = or_(done, ~lease.is_free(WrittenRecord.leased_until, now))
    always = is_always_recorded(kind if isinstance(kind, RecordKind) else RecordKind.RUN, attached.role)
    return ~exists().where(theirs, done) if always else exists().where(theirs, ~done)
