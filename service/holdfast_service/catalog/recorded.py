"""Which stores have the newest record of a subject, as the catalog knows it: what all attached stores have is due no
more, until one is attached that has it not.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, false, func, or_, text, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_tables import SUBJECT_TO_RECORD, RecordSubject, WrittenRecord
from holdfast_service.catalog.record_writing import is_always_recorded
from holdfast_service.catalog.tables import TO_RECORD, Checkpoint
from holdfast_service.context import ServiceContext

# What has records, its kind and key, and what is due of it.
_RECORDED = (
    (RecordSubject, RecordSubject.kind, RecordSubject.subject_id, SUBJECT_TO_RECORD),
    (Checkpoint, RecordKind.CHECKPOINT, Checkpoint.id, TO_RECORD),
)


def note_recorded(session: Session, context: ServiceContext) -> None:
    """What every attached store has in its newest version is due no more. Asked of the rows, so that it is the same
    whoever has written last."""
    for table, kind, key, behind in _RECORDED:
        older = [is_older(each, kind, key, table.version) for each in context.stores]
        session.execute(
            update(table).where(text(behind), ~or_(*older)).values(recorded_version=table.version),
            execution_options={"synchronize_session": False},
        )


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
    """Whether this store is to have a record of the subject and has an older one; given the time, one that nobody
    writes at the moment."""
    theirs = and_(
        WrittenRecord.kind == kind,
        WrittenRecord.subject_id == subject_id,
        WrittenRecord.store_id == attached.store_id,
    )
    done = or_(WrittenRecord.version >= version, WrittenRecord.removed_at.is_not(None))
    if now is not None:
        done = or_(done, func.coalesce(WrittenRecord.leased_until > now, false()))
    always = is_always_recorded(kind if isinstance(kind, RecordKind) else RecordKind.RUN, attached.role)
    return ~exists().where(theirs, done) if always else exists().where(theirs, ~done)
