"""The bytes that the stores would have less without some checkpoints, net of sharing with everything that stays.

A chunk goes if a checkpoint that expires needs it and nothing that stays does. What stays: whatever else is committed
or uploading in the project, of any run; and of the trash only what is held or pinned, for nothing else of it is there
for long. So a chunk that an expiring checkpoint shares with the trash counts here: without this plan it would stay.

Counted are the copies that are there, as they are stored, in all stores. What is only expected (an upload under way) or
on its way out already is not.

One pass over the chunk lists of the project: a set of the lists, each with what it means for its chunks, joined to
their entries and grouped by chunk (docs/adr, "Retention counts the bytes of a plan in one pass").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from sqlalchemy import Column, MetaData, Table, Text, and_, case, exists, func, insert, literal, or_, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.pruning import FreedBytes
from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.catalog.held import is_held
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Run, Shard, ShardChunk, Store
from holdfast_service.retention.in_force import is_pinned

_THERE = (CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING, CopyState.SUSPECT, CopyState.BAD)
_NEEDING = (
    CheckpointState.UPLOADING,
    CheckpointState.COMMITTED,
    CheckpointState.TRASHED,
)
_ROWS_PER_INSERT = 10_000
# Of the session alone, and gone with its transaction: 50,000 checkpoints are more than a statement has parameters.
_EXPIRING = Table(
    "expiring_checkpoints", MetaData(), Column("checkpoint_id", Text, primary_key=True), prefixes=["TEMPORARY"]
)
_WORK_MEMORY = "256MB"


def freed_bytes(session: Session, project_id: str, checkpoint_ids: Collection[str]) -> FreedBytes:
    """`session` is one of Database.read(): what it makes for this is gone with it."""
    if not checkpoint_ids:
        return FreedBytes(bytes=0)
    _fill(session, checkpoint_ids)
    lists = _lists(session, project_id)
    entries = (
        select(
            ChunkListEntry.chunk_id,
            func.max(lists.c.expires).label("expires"),
            func.max(lists.c.stays).label("stays"),
        )
        .join(lists, lists.c.chunk_list_id == ChunkListEntry.chunk_list_id)
        .group_by(ChunkListEntry.chunk_id)
        .having(func.max(lists.c.expires) == 1, func.max(lists.c.stays) == 0)
        .subquery()
    )
    rows = session.execute(
        select(Store.url, func.sum(Copy.stored_bytes))
        .join(Store, Store.id == Copy.store_id)
        .join(entries, entries.c.chunk_id == Copy.chunk_id)
        .where(Copy.state.in_(_THERE), ~_wanted_by_an_open_shard())
        .group_by(Store.url)
        .order_by(Store.url)
    )
    by_store = {url: int(total) for url, total in rows}
    return FreedBytes(bytes=sum(by_store.values()), by_store=by_store)


def _fill(session: Session, checkpoint_ids: Collection[str]) -> None:
    connection = session.connection()
    postgres = connection.dialect.name == "postgresql"
    if postgres:
        # A hash of ten million chunks is worth the memory of one backend; it spills where that is not enough.
        connection.execute(text(f"SET LOCAL work_mem = '{_WORK_MEMORY}'"))
    _EXPIRING.create(connection)
    for some in _portions(checkpoint_ids):
        session.execute(insert(_EXPIRING), some)
    if postgres:
        # Without figures the planner takes the table for a thousand rows and walks the shards one by one.
        connection.execute(text(f"ANALYZE {_EXPIRING.name}"))


def _portions(checkpoint_ids: Iterable[str]) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(checkpoint_ids)
    while some := [{"checkpoint_id": one} for one in islice(remaining, _ROWS_PER_INSERT)]:
        yield some


def _lists(session: Session, project_id: str) -> Any:
    """Each chunk list of the project that is in use: whether something that expires needs it, and something that
    stays."""
    expiring = _EXPIRING.c.checkpoint_id.is_not(None)
    going = and_(Checkpoint.state == CheckpointState.TRASHED, ~or_(is_held(session), is_pinned(session)))
    return (
        select(
            Shard.chunk_list_id,
            func.max(case((expiring, 1), else_=0)).label("expires"),
            func.max(case((or_(expiring, going), 0), else_=1)).label("stays"),
        )
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .outerjoin(_EXPIRING, _EXPIRING.c.checkpoint_id == Checkpoint.id)
        .where(Run.project_id == project_id, Checkpoint.state.in_(_NEEDING), Shard.chunk_list_id.is_not(None))
        .group_by(Shard.chunk_list_id)
        .subquery()
    )


def _wanted_by_an_open_shard() -> Any:
    """Over `copies`: an upload has been told that the chunk is there."""
    return exists(
        select(literal(1))
        .select_from(ShardChunk)
        .join(Shard, Shard.id == ShardChunk.shard_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(ShardChunk.chunk_id == Copy.chunk_id, Checkpoint.state == CheckpointState.UPLOADING)
    )
