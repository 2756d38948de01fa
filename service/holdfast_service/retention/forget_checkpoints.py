"""The rows of checkpoints that are over, whose chunks and records are gone: they may go from the catalog.

What the metrics count over all time is kept in one row per project, or a counter would go back.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, delete, exists, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.custody_tables import CheckpointCopy, ForgottenTotal, Hold, Operation
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_tables import WrittenRecord
from holdfast_service.catalog.tables import Checkpoint, ReadLease, Run, Shard

AT_ONCE = 100
OVER = (CheckpointState.ABORTED, CheckpointState.DELETED)
_UNSYNCHRONIZED = {"synchronize_session": False}


def is_forgettable() -> ColumnElement[bool]:
    """Over `checkpoints`: the collector has dropped its references, and no store has a record of it. A record without
    a row would be taken for a commit that the database has lost."""
    recorded = exists().where(WrittenRecord.kind == RecordKind.CHECKPOINT, WrittenRecord.subject_id == Checkpoint.id)
    return and_(Checkpoint.state.in_(OVER), Checkpoint.forgotten_at.is_not(None), ~recorded)


def forget_checkpoints(session: Session, checkpoint_ids: Sequence[str]) -> int:
    """Those of them that are forgettable; how many."""
    rows = session.execute(
        select(Checkpoint.id, Run.project_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(Checkpoint.id.in_(checkpoint_ids), is_forgettable())
        .order_by(Checkpoint.id)
        .with_for_update(of=Checkpoint, skip_locked=True)
    ).all()
    ids = [row.id for row in rows]
    for project_id in sorted({row.project_id for row in rows}):
        _count(session, project_id, [row.id for row in rows if row.project_id == project_id])
    session.execute(
        update(Operation).where(Operation.checkpoint_id.in_(ids)).values(checkpoint_id=None),
        execution_options=_UNSYNCHRONIZED,
    )
    for table in (Shard, ReadLease, Hold, CheckpointCopy):
        session.execute(delete(table).where(table.checkpoint_id.in_(ids)), execution_options=_UNSYNCHRONIZED)
    session.execute(delete(Checkpoint).where(Checkpoint.id.in_(ids)), execution_options=_UNSYNCHRONIZED)
    return len(ids)


def _count(session: Session, project_id: str, ids: Sequence[str]) -> None:
    committed = Checkpoint.committed_at.is_not(None)
    sums = session.execute(
        select(
            func.count(Checkpoint.committed_at).label("committed"),
            func.count(Checkpoint.aborted_at).label("aborted"),
            func.sum(Checkpoint.chunk_bytes).filter(committed).label("chunk_bytes"),
            func.sum(Checkpoint.uploaded_bytes).filter(committed).label("uploaded_bytes"),
            func.sum(Checkpoint.deduplicated_bytes).filter(committed).label("deduplicated_bytes"),
        ).where(Checkpoint.id.in_(ids))
    ).one()
    insert_absent(session, ForgottenTotal, [{"project_id": project_id}])
    more = {name: getattr(ForgottenTotal, name) + int(value or 0) for name, value in sums._mapping.items()}
    session.execute(
        update(ForgottenTotal).where(ForgottenTotal.project_id == project_id).values(more),
        execution_options=_UNSYNCHRONIZED,
    )
