"""What is lost and what is cold: from a chunk to every checkpoint that needs it, and back again.

Health has one value, and the mark keeps what it covers: a checkpoint in quarantine that became corrupt goes back into
quarantine, and not to `ok`, once its bytes are whole again.

Marking and taking a mark away both ask every store of the catalog, and not only those that this process has: a process
that lacks a setting must not condemn what another store keeps.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial

from sqlalchemy import ColumnElement, CompoundSelect, Select, exists, func, or_, select, union
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, Health, Tier
from holdfast_protocol.tiers import ARCHIVED, COLD_STORE, coldness
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.copies.predicates import counts_as_read, is_readable_anywhere, keeps_anywhere, may_keep
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Run, Shard, ShardChunk
from holdfast_service.runs.views import locked_checkpoint

_NEEDING = (CheckpointState.COMMITTED, CheckpointState.TRASHED)
_COVERED = re.compile(r" \(Before that: (?P<health>diverged|quarantined): (?P<reason>.*)\)\Z", re.DOTALL)


def corrupt_reason(why: str, health: Health, health_reason: str | None) -> str:
    """What a corrupt checkpoint says of itself, and of the health that it had. Pure."""
    if health is Health.OK or health is Health.CORRUPT:
        return why
    return f"{why} (Before that: {health.value}: {health_reason or ''})"


def health_once_whole(reason: str | None) -> tuple[Health, str | None]:
    """The inverse: health and reason of a checkpoint whose chunks are all readable again. Pure."""
    match = _COVERED.search(reason or "")
    return (Health(match["health"]), match["reason"] or None) if match else (Health.OK, None)


def users_of(session: Session, *chunk_ids: int) -> set[str]:
    """The ids of the checkpoints that need one of the chunks, or that negotiated it and may come to."""
    return set(session.scalars(_users(chunk_ids)))


def lock_users(session: Session, *chunk_ids: int) -> set[str]:
    """Locks them, in order, and gives their ids.

    Those that upload are among them: a commit holds its checkpoint's lock from its look at the copies to its end, so
    once all of them are held, each has either committed, and is seen, or will look at the copies later.
    """
    ids = users_of(session, *chunk_ids)
    session.execute(
        select(Checkpoint.id)
        .where(Checkpoint.id.in_(_users(chunk_ids)), Checkpoint.state.in_((*_NEEDING, CheckpointState.UPLOADING)))
        .order_by(Checkpoint.id)
        .with_for_update()
    ).all()
    return ids


def mark_users(session: Session, chunk_id: int, why: str, *, actor: Actor) -> list[str]:
    """Marks each committed checkpoint that needs the chunk if every copy that it could rely on was read and is bad, in
    every store; the ids of those marked so. The process that finds the last copy bad calls it.

    Called after `lock_users`, in a later statement.
    """
    lists = select(ChunkListEntry.chunk_list_id).where(ChunkListEntry.chunk_id == chunk_id)
    kept = exists().where(Copy.chunk_id == chunk_id, may_keep(Checkpoint.attempt_id))
    rows = session.scalars(
        select(Checkpoint)
        .where(
            Checkpoint.id.in_(select(Shard.checkpoint_id).where(Shard.chunk_list_id.in_(lists))),
            Checkpoint.state.in_(_NEEDING),
            ~kept,
        )
        .order_by(Checkpoint.id),
        execution_options={"populate_existing": True},
    ).all()
    for checkpoint in rows:
        if checkpoint.health != Health.CORRUPT:
            reason = corrupt_reason(why, Health(checkpoint.health), checkpoint.health_reason)
            _set_health(session, checkpoint, Health.CORRUPT, reason, actor=actor, action="checkpoint.mark_corrupt")
    return [checkpoint.id for checkpoint in rows]


def _users(chunk_ids: Collection[int]) -> CompoundSelect[tuple[str]]:
    sealed = (
        select(Shard.checkpoint_id)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .where(ChunkListEntry.chunk_id.in_(chunk_ids))
    )
    negotiated = (
        select(Shard.checkpoint_id)
        .join(ShardChunk, ShardChunk.shard_id == Shard.id)
        .where(ShardChunk.chunk_id.in_(chunk_ids))
    )
    return union(sealed, negotiated)


def repair_if_whole(session: Session, checkpoint_id: str, *, actor: Actor) -> bool:
    """Takes the mark away if every chunk has a copy to rely on in some store, one that was read since damage was found.
    Whether it did; if not, it keeps a blocking chunk, and no pass checks again before that chunk has changed."""
    checkpoint = locked_checkpoint(session, checkpoint_id)
    if checkpoint.health != Health.CORRUPT or checkpoint.state not in _NEEDING:
        return False
    kept = exists().where(
        Copy.chunk_id == ChunkListEntry.chunk_id,
        keeps_anywhere(checkpoint.attempt_id),
        read_since_damage(),
    )
    listed = session.scalar(
        select(func.count()).where(Shard.checkpoint_id == checkpoint_id, Shard.chunk_list_id.is_not(None))
    )
    if listed != checkpoint.world_size:
        # After a rebuild from a damaged record: the chunks that it needs are unknown.
        checkpoint.lost_chunk_id = 0
        return False
    lost = session.scalar(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint_id, ~kept)
        .limit(1)
    )
    checkpoint.lost_chunk_id = lost
    if lost is not None:
        return False
    health, reason = health_once_whole(checkpoint.health_reason)
    _set_health(session, checkpoint, health, reason, actor=actor, action="checkpoint.repair")
    return True


def read_since_damage(copy: type[Copy] = Copy) -> ColumnElement[bool]:
    """Over `copies`: its chunk was never found damaged, or the service has read this copy since the last time; one in
    an archive it has asked the store for.

    Which came first the chunk's own count says: a clock may have been wrong when the one was written down.

    A copy that was sent anew is good enough for its own checkpoint at once, as ever; but others are only said to be
    whole again when its bytes were seen.
    """
    damaged = aliased(Copy)
    return ~exists().where(
        damaged.chunk_id == copy.chunk_id,
        damaged.bad_at.is_not(None),
        or_(copy.proof.is_(None), ~counts_as_read(copy), copy.read_after < damaged.damage),
    )


def needed_by_a_checkpoint(copy: type[Copy] = Copy) -> ColumnElement[bool]:
    """Over `copies`: a checkpoint that is there, in the trash, or about to commit needs the chunk."""
    return exists().where(
        ChunkListEntry.chunk_id == copy.chunk_id,
        ChunkListEntry.chunk_list_id == Shard.chunk_list_id,
        Shard.checkpoint_id == Checkpoint.id,
        Checkpoint.state.in_((*_NEEDING, CheckpointState.UPLOADING)),
    )


def _set_health(
    session: Session, checkpoint: Checkpoint, health: Health, reason: str | None, *, actor: Actor, action: str
) -> None:
    before = {"health": checkpoint.health, "health_reason": checkpoint.health_reason}
    checkpoint.health, checkpoint.health_reason = health.value, reason
    checkpoint.version += 1
    record_event(
        session,
        actor,
        action,
        project_id=session.scalar(select(Run.project_id).where(Run.id == checkpoint.run_id)),
        run_id=checkpoint.run_id,
        checkpoint_id=checkpoint.id,
        reason=reason,
        before=before,
        after={"health": checkpoint.health, "health_reason": reason},
    )


def mark_cold(session: Session, chunk_ids: Collection[int], *, actor: Actor, target: str | None = None) -> list[str]:
    """The ids of the checkpoints that need one of these chunks and cannot read it before a thaw, though it is not lost.
    `target`: where the chunks have gone. A process that takes the last readable copy of a chunk away calls it in the
    same transaction, with the locks of all users held (`lock_users`)."""
    of_it = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id)
    # Without it the checkpoint within would be any that there is.
    readable = of_it.where(is_readable_anywhere(Checkpoint.attempt_id)).correlate(ChunkListEntry, Checkpoint)
    kept = of_it.where(keeps_anywhere(Checkpoint.attempt_id)).correlate(ChunkListEntry, Checkpoint)
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


def mark_readable(database: Database, chunk_id: int, *, actor: Actor) -> None:
    """The inverse, once a copy of the chunk can be read again in place of a bad one: each checkpoint that is cold,
    needs the chunk and can read all its other chunks becomes hot. A thaw that a person asked for settles its own.

    One checkpoint a transaction, under its lock alone, which each process holds that takes a readable copy away: the
    chunk may have thousands of users, and each of them 10^5 chunks. Repeatable.
    """
    with database.read() as session:
        waiting = session.scalars(_cold_users(chunk_id)).all()
    for checkpoint_id in waiting:
        database.run(partial(_mark_hot, checkpoint_id=checkpoint_id, actor=actor))


def _cold_users(chunk_id: int) -> Select[str]:
    """Those that can read the chunk now, the newest first: a launch may wait for it. What a policy has moved is where
    it belongs, and is left out."""
    lists = select(ChunkListEntry.chunk_list_id).where(ChunkListEntry.chunk_id == chunk_id)
    return (
        select(Checkpoint.id)
        .where(
            Checkpoint.id.in_(select(Shard.checkpoint_id).where(Shard.chunk_list_id.in_(lists))),
            Checkpoint.state.in_(_NEEDING),
            Checkpoint.tier == Tier.COLD,
            Checkpoint.thawed_until.is_(None),
            or_(
                Checkpoint.tier_wanted.is_(None),
                Checkpoint.tier_wanted.not_in((*ARCHIVED, COLD_STORE)),
                Checkpoint.cold_class.is_(None),
            ),
            exists().where(Copy.chunk_id == chunk_id, is_readable_anywhere(Checkpoint.attempt_id)),
        )
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.id)
    )


def _mark_hot(session: Session, checkpoint_id: str, *, actor: Actor) -> None:
    checkpoint = locked_checkpoint(session, checkpoint_id)
    if checkpoint.state not in _NEEDING or checkpoint.tier != Tier.COLD or checkpoint.thawed_until is not None:
        return
    # A later statement: it sees what others took away while this waited for the lock.
    readable = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, is_readable_anywhere(checkpoint.attempt_id))
    unreadable = session.scalar(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint_id, ~readable)
        .limit(1)
    )
    if unreadable is None:
        set_tier(session, checkpoint, Tier.HOT, actor=actor, action="checkpoint.readable")


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
