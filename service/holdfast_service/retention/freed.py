"""The bytes that the stores would have less without some checkpoints, net of sharing with everything that stays.

A chunk goes if a checkpoint that expires needs it and nothing that stays does. What stays: whatever else is committed
or uploading in the project, of any run; and of the trash only what is held or pinned, for nothing else of it is there
for long. So a chunk that an expiring checkpoint shares with the trash counts here: without this plan it would stay.

Counted are the copies that are there, as they are stored, in all stores. What is only expected (an upload under way) or
on its way out already is not.

Two steps, with figures for the planner in between: the chunks that the expiring checkpoints need, and of these the
copies that nothing needs which stays. So a plan that expires one checkpoint of a large project is quick, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    Select,
    Table,
    Text,
    and_,
    cast,
    exists,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.orm import Session

from holdfast_protocol.pruning import FreedBytes
from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.catalog.held import is_held
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Shard, ShardChunk, Store
from holdfast_service.retention.in_force import is_pinned

_THERE = (CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING, CopyState.SUSPECT, CopyState.BAD)
# Of the session alone, and gone with its transaction: 50,000 checkpoints are more than a statement has parameters, and
# what the planner guesses of the chunks between two joins is wrong by a thousand times.
_OWN = MetaData()
_EXPIRING = Table("expiring_checkpoints", _OWN, Column("checkpoint_id", Text, primary_key=True), prefixes=["TEMPORARY"])
# Without an index: two million rows come in the order of a hash.
_THEIRS = Table("their_chunks", _OWN, Column("chunk_id", BigInteger, nullable=False), prefixes=["TEMPORARY"])
_WORK_MEMORY = "256MB"


def freed_bytes(session: Session, checkpoint_ids: Collection[str]) -> FreedBytes:
    """`session` is one of Database.read(), and asked once: what is made for this is gone with it."""
    if not checkpoint_ids:
        return FreedBytes(bytes=0)
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        # A hash of millions of chunks is worth the memory of one backend; it spills where that is not enough.
        connection.execute(text(f"SET LOCAL work_mem = '{_WORK_MEMORY}'"))
    _OWN.create_all(connection, checkfirst=False)
    _fill(connection, checkpoint_ids)
    _count(connection, _EXPIRING)
    connection.execute(insert(_THEIRS).from_select(["chunk_id"], _their_chunks()))
    _count(connection, _THEIRS)
    rows = connection.execute(
        select(Store.url, func.sum(Copy.stored_bytes))
        .join(Store, Store.id == Copy.store_id)
        .join(_THEIRS, _THEIRS.c.chunk_id == Copy.chunk_id)
        .where(Copy.state.in_(_THERE), ~_needed_by_what_stays(session), _THEIRS.c.chunk_id.not_in(_relied_on()))
        .group_by(Store.url)
        .order_by(Store.url)
    )
    by_store = {url: int(total) for url, total in rows}
    return FreedBytes(bytes=sum(by_store.values()), by_store=by_store)


def _fill(connection: Connection, checkpoint_ids: Collection[str]) -> None:
    """In one statement: row by row, 100,000 would take longer than the rest of the plan."""
    ids = list(checkpoint_ids)
    if connection.dialect.name == "postgresql":
        each: Select[Any] = select(func.unnest(cast(ids, ARRAY(Text))))
    else:
        each = select(func.json_each(json.dumps(ids)).table_valued("value").c.value)
    connection.execute(insert(_EXPIRING).from_select(["checkpoint_id"], each))


def _count(connection: Connection, table: Table) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"ANALYZE {table.name}"))


def _their_chunks() -> Select[Any]:
    """What the expiring checkpoints need, each chunk once."""
    return (
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(_EXPIRING, _EXPIRING.c.checkpoint_id == Shard.checkpoint_id)
        .distinct()
    )


def _needed_by_what_stays(session: Session) -> ColumnElement[bool]:
    """Over `their_chunks`: by whatever else is there, or is held or pinned in the trash."""
    stays = or_(
        Checkpoint.state.in_((CheckpointState.UPLOADING, CheckpointState.COMMITTED)),
        and_(Checkpoint.state == CheckpointState.TRASHED, or_(is_held(session), is_pinned(session))),
    )
    expires = exists().where(_EXPIRING.c.checkpoint_id == Checkpoint.id)
    return exists().where(
        ChunkListEntry.chunk_id == _THEIRS.c.chunk_id,
        Shard.chunk_list_id == ChunkListEntry.chunk_list_id,
        Checkpoint.id == Shard.checkpoint_id,
        stays,
        ~expires,
    )


def _relied_on() -> Select[Any]:
    """The chunks that an upload under way has been told of: they are there, and need not be sent."""
    return (
        select(ShardChunk.chunk_id)
        .join(Shard, Shard.id == ShardChunk.shard_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(Checkpoint.state == CheckpointState.UPLOADING)
    )
