"""What makes a record due: every change that a rebuilt catalog has to know (protocol rule 30).

A checkpoint is due while its `recorded_version` is behind its `version`; a project or a run by its row in
`record_subjects`. Either is written in the transaction of the change itself, so that no commit is without its record
for longer than a round of the controller `records`.
"""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_tables import RecordSubject, WrittenRecord
from holdfast_service.catalog.tables import Checkpoint


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
