"""One rank's shard of a checkpoint, as a row."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import ShardState
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.tables import Checkpoint, Shard
from holdfast_service.catalog.writing import refuse_unless_in_world


def shard_of(session: Session, checkpoint: Checkpoint, rank: int) -> Shard | None:
    """None if the rank has not called yet. Raises `invalid_request` for a rank outside the world."""
    refuse_unless_in_world(checkpoint, rank)
    return session.execute(
        select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank),
        execution_options={"populate_existing": True},
    ).scalar_one_or_none()


def locked_shard(session: Session, checkpoint: Checkpoint, rank: int) -> Shard:
    """FOR UPDATE: a late negotiation of the same rank must not add references while it is sealed. Made if absent."""
    refuse_unless_in_world(checkpoint, rank)
    locked = select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank).with_for_update()
    anew = {"populate_existing": True}
    if (shard := session.execute(locked, execution_options=anew).scalar_one_or_none()) is not None:
        return shard
    insert_absent(
        session,
        Shard,
        [
            {
                "checkpoint_id": checkpoint.id,
                "rank": rank,
                "state": ShardState.OPEN,
                "logical_bytes": 0,
                "uploaded_bytes": 0,
                "components": {},
                "finite": True,
            }
        ],
    )
    return session.execute(locked, execution_options=anew).scalar_one()
