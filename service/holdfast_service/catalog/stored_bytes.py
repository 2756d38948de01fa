"""What checkpoints hold and what they take up. The rows themselves are counted: no counter that could drift.

logical        what the states of the committed checkpoints are, as the trainer sees them
stored         what the copies of their chunks take in the stores
deduplicated   what these checkpoints did not send, because it was there
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.catalog.copies import KEPT
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Run, Shard
from holdfast_service.context import ServiceContext


class CommittedBytes(NamedTuple):
    logical: int = 0
    deduplicated: int = 0


def stored_bytes(session: Session, project_ids: Collection[str], *, store_id: int | None = None) -> dict[str, int]:
    """By project id; everything that may be in the stores, uploads that are under way among it. `store_id`: in that one
    only."""
    statement = (
        select(Copy.project_id, func.sum(Copy.stored_bytes))
        .where(Copy.project_id.in_(project_ids), Copy.state != CopyState.GONE)
        .group_by(Copy.project_id)
    )
    if store_id is not None:
        statement = statement.where(Copy.store_id == store_id)
    found = {project_id: int(total) for project_id, total in session.execute(statement)}
    return {project_id: found.get(project_id, 0) for project_id in project_ids}


def bytes_against_quota(session: Session, context: ServiceContext, project_ids: Collection[str]) -> dict[str, int]:
    """By project id: what is in the primary store, which jobs write to. Copies elsewhere do not count, whether this
    process has that store attached or not: whoever asks for them must not stop the jobs' saves."""
    return stored_bytes(session, project_ids, store_id=context.store_id)


def stored_bytes_of_run(session: Session, run_id: str) -> int:
    """Of the chunks that its committed checkpoints need, each once. What runs share counts in each of them.

    It looks at every chunk of the run, so it is asked for one run at a time.
    """
    lists = (
        select(Shard.chunk_list_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.COMMITTED)
    )
    chunks = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    total = session.scalar(
        select(func.sum(Copy.stored_bytes)).where(Copy.chunk_id.in_(chunks), Copy.state != CopyState.GONE)
    )
    return int(total or 0)


def stored_bytes_of_checkpoint(session: Session, checkpoint_id: str) -> int:
    """Of the distinct chunks that it needs, each in its smallest copy that is whole: less than the chunks' own bytes
    where they are compressed. It looks at every chunk, so it is asked for one checkpoint at a time."""
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    chunks = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    smallest = (
        select(func.min(Copy.stored_bytes).label("stored"))
        .where(Copy.chunk_id.in_(chunks), Copy.state.in_((*KEPT, CopyState.SUSPECT)))
        .group_by(Copy.chunk_id)
        .subquery()
    )
    return int(session.scalar(select(func.sum(smallest.c.stored))) or 0)


def committed_bytes(session: Session, project_ids: Collection[str]) -> dict[str, CommittedBytes]:
    """By project id; of the checkpoints that are committed now."""
    rows = session.execute(
        select(Run.project_id, func.sum(Checkpoint.logical_bytes), func.sum(Checkpoint.deduplicated_bytes))
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .where(Run.project_id.in_(project_ids), Checkpoint.state == CheckpointState.COMMITTED)
        .group_by(Run.project_id)
    )
    found = {project_id: CommittedBytes(int(logical), int(kept)) for project_id, logical, kept in rows}
    return {project_id: found.get(project_id, CommittedBytes()) for project_id in project_ids}
