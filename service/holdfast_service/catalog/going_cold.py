"""A checkpoint is cold when one of its chunks cannot be read before a thaw. Whoever takes the last readable copy of a
chunk away says so of all its users here, in the same transaction, holding their locks (catalog.corruption.lock_users).
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, Tier
from holdfast_protocol.tiers import coldness
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.copies import is_readable, keeps_whole
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Run, Shard

_NEEDING = (CheckpointState.COMMITTED, CheckpointState.TRASHED)


def mark_cold(
    session: Session, chunk_ids: Collection[int], store_ids: Collection[int], *, actor: Actor, target: str | None = None
) -> list[str]:
    """The ids of the checkpoints that need one of these chunks and cannot read it now, though it is not lost. `target`:
    where the chunks have gone."""
    readable = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, is_readable(store_ids, Checkpoint.attempt_id))
    kept = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, keeps_whole(store_ids, Checkpoint.attempt_id))
    unreadable = exists().where(
        ChunkListEntry.chunk_id.in_(chunk_ids),
        Shard.chunk_list_id == ChunkListEntry.chunk_list_id,
        Shard.checkpoint_id == Checkpoint.id,
        ~readable,
        kept,
    )
    users = select(Shard.checkpoint_id).where(
        Shard.chunk_list_id.in_(select(ChunkListEntry.chunk_list_id).where(ChunkListEntry.chunk_id.in_(chunk_ids)))
    )
    rows = session.scalars(
        select(Checkpoint)
        .where(Checkpoint.id.in_(users), Checkpoint.state.in_(_NEEDING), unreadable)
        .order_by(Checkpoint.id),
        execution_options={"populate_existing": True},
    ).all()
    for checkpoint in rows:
        if target is not None and coldness(target) > coldness(checkpoint.cold_class):
            checkpoint.cold_class = target
        set_tier(session, checkpoint, Tier.COLD, actor=actor, action="checkpoint.cool")
    return [checkpoint.id for checkpoint in rows]


def set_tier(
    session: Session, checkpoint: Checkpoint, tier: Tier, *, actor: Actor, action: str, always: bool = False
) -> None:
    """With its event, if it is another one, or `always`. The checkpoint's row is locked by the caller."""
    if tier is not Tier.HOT:
        checkpoint.readable_until = None
    if checkpoint.tier == tier and not always:
        return
    before = checkpoint.tier
    checkpoint.tier = tier
    checkpoint.version += 1
    record_event(
        session,
        actor,
        action,
        project_id=session.scalar(select(Run.project_id).where(Run.id == checkpoint.run_id)),
        run_id=checkpoint.run_id,
        checkpoint_id=checkpoint.id,
        before={"tier": before},
        after={"tier": tier.value} | ({"place": checkpoint.cold_class} if tier is Tier.COLD else {}),
    )
