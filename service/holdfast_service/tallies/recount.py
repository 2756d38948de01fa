"""Finds out what bytes are kept for, where something has changed since they were counted.

    a checkpoint's mark ─> marks of its chunks, some shards at a time
    a chunk's mark      ─> as what its copies are counted ─> copies.counted, and the difference as deltas

Whatever changes what a byte is kept for leaves a mark in its own transaction, so a mark is seen only when its change
is. Only the end of a pin or a hold is waited for: any other mark that is dated later than now was dated by a clock that
was ahead. Such a clock has ends taken up before their time: a pin or a hold that is in force, and whose end has no
mark, gets one again. A first look locks nothing, and mostly finds that nothing has changed. What has changed is looked
at again behind locks: the copies' own, so that no two counts of one copy cross; and the chunk's, if nothing but trash
seems to need it, so that no negotiation is just relying on it (rule mark-before-delete). A chunk that is locked stays
marked: a recount waits for nobody who writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, delete, exists, insert, literal, or_, select, union, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.db.tables.operations import Hold
from holdfast_service.db.tables.tallies import ByteDelta, Counted, RecountMark
from holdfast_service.holds.held import in_force, pin_in_force

_MARKS = 1000
_SHARDS = 50
_UNSYNCHRONIZED = {"synchronize_session": False}
_WHY = Counted.PENDING_COLLECTION
_KEEPS = Counted.PINNED | Counted.HELD
_NEEDED = (Counted.COMMITTED, Counted.TRASHED)
_IN_TRASH = (CheckpointState.TRASHED, CheckpointState.DELETING)
_NEEDING = (CheckpointState.UPLOADING, CheckpointState.COMMITTED, *_IN_TRASH)


@dataclass
class Recounted:
    """`marks` that were settled; `copies` that are counted as something else; `waiting`: chunks that were locked."""

    marks: int = 0
    copies: int = 0
    waiting: int = 0


def is_due(now: datetime) -> ColumnElement[bool]:
    """Over `recount_marks`: all, but those of a pin or a hold whose end is still to come."""
    pin = exists().where(Checkpoint.id == RecountMark.checkpoint_id, Checkpoint.pinned_until == RecountMark.due_at)
    hold = exists().where(Hold.checkpoint_id == RecountMark.checkpoint_id, Hold.retain_until == RecountMark.due_at)
    return or_(RecountMark.due_at <= now, RecountMark.checkpoint_id.is_(None), ~RecountMark.keeps, ~or_(pin, hold))


def take_up_marks(context: ServiceContext, recounted: Recounted, *, most: int = 200) -> bool:
    """At most so many portions of them; whether none is due any more, but for chunks that were locked."""
    for _ in range(most):
        if context.stopping.is_set():
            return False
        expanded = context.database.run(_expand)
        found = context.database.run(_recount_marked)
        recounted.marks += found.marks
        recounted.copies += found.copies
        recounted.waiting = found.waiting
        if not expanded and not found.marks:
            return True
    return False


def _expand(session: Session) -> int:
    """Leaves marks at the chunks of marked checkpoints; how many checkpoints. In the order of their moments, which the
    marks of the chunks keep: so the oldest mark always says until when all is counted."""
    due = (
        select(RecountMark)
        .where(is_due(database_now(session)), RecountMark.checkpoint_id.is_not(None))
        .order_by(RecountMark.due_at, RecountMark.id)
        .limit(_SHARDS)
        .with_for_update(skip_locked=True)
    )
    marks = session.scalars(due).all()
    for mark in marks:
        shards = session.execute(
            select(Shard.id, Shard.chunk_list_id)
            .where(Shard.checkpoint_id == mark.checkpoint_id, Shard.id > mark.after_shard_id)
            .order_by(Shard.id)
            .limit(_SHARDS)
        ).all()
        if shards:
            lists = [row.chunk_list_id for row in shards if row.chunk_list_id is not None]
            chunks = union(
                select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists)),
                select(ShardChunk.chunk_id).where(ShardChunk.shard_id.in_([row.id for row in shards])),
            ).subquery()
            keeps = literal(mark.keeps or _was_ever_held(session, mark.checkpoint_id))
            rows = select(chunks.c.chunk_id, keeps, literal(mark.due_at, RecountMark.due_at.type))
            session.execute(insert(RecountMark).from_select(["chunk_id", "keeps", "due_at"], rows))
        if len(shards) == _SHARDS:
            mark.after_shard_id = shards[-1].id
        else:
            session.delete(mark)
    return len(marks)


def _was_ever_held(session: Session, checkpoint_id: str | None) -> bool:
    pinned = exists().where(Checkpoint.id == checkpoint_id, Checkpoint.pinned_at.is_not(None))
    return bool(session.scalar(select(or_(pinned, exists().where(Hold.checkpoint_id == checkpoint_id)))))


def _recount_marked(session: Session) -> Recounted:
    due = (
        select(RecountMark.id, RecountMark.chunk_id, RecountMark.keeps)
        .where(RecountMark.chunk_id.is_not(None))
        .order_by(RecountMark.due_at, RecountMark.id)
        .limit(_MARKS)
        .with_for_update(skip_locked=True)
    )
    marks = session.execute(due).all()
    keeps: defaultdict[int, bool] = defaultdict(bool)
    for mark in marks:
        keeps[mark.chunk_id] |= mark.keeps
    done = recount(session, keeps)
    mark_ends(session, done.unmarked)
    settled = [mark.id for mark in marks if mark.chunk_id not in done.locked]
    session.execute(delete(RecountMark).where(RecountMark.id.in_(settled)), execution_options=_UNSYNCHRONIZED)
    return Recounted(marks=len(settled), copies=len(done.changed), waiting=len(done.locked))


Ends = Mapping[tuple[str, datetime], Collection[int]]
"""The checkpoint and the end of pins and holds that are in force and whose end has no mark, because a clock that was
ahead had it taken up -> the chunks that they keep, which may have been counted as kept no more."""


class Recount(NamedTuple):
    """`changed`: the chunk of each copy that is counted as something else now. `locked`: chunks that were left alone,
    because they are locked."""

    changed: Sequence[int]
    locked: Collection[int]
    unmarked: Ends


def mark_ends(session: Session, unmarked: Ends) -> None:
    """Each of these ends is waited for again, and all chunks of its checkpoint are counted anew."""
    if unmarked:
        now = database_now(session)
        due = sorted({*unmarked, *((checkpoint_id, now) for checkpoint_id, _ in unmarked)})
        rows = [{"checkpoint_id": checkpoint_id, "due_at": at, "keeps": True} for checkpoint_id, at in due]
        session.execute(insert(RecountMark), rows)


def recount(session: Session, keeps: Mapping[int, bool]) -> Recount:
    """`keeps`: by chunk id, whether pins and holds are to be looked for as well."""
    seen = look(session, keeps)
    changing = [each for each in seen.copies if each.now != each.counted]
    if not changing:
        return Recount((), (), seen.unmarked)
    unneeded = {each.chunk_id for each in changing if _why(each.now) not in (Counted.COMMITTED, Counted.ARRIVING)}
    locks = select(Chunk.id).where(Chunk.id.in_(unneeded)).order_by(Chunk.digest).with_for_update(skip_locked=True)
    free = set(session.scalars(locks))
    copies = select(Copy.id).where(Copy.id.in_([each.copy_id for each in changing])).order_by(Copy.id)
    session.execute(copies.with_for_update(key_share=True)).all()
    # A later statement: it sees what those have committed that the locks have waited for.
    again = look(session, {each.chunk_id: keeps[each.chunk_id] for each in changing})
    locked: set[int] = set()
    moves: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for each in again.copies:
        if each.now == each.counted:
            continue
        if _why(each.now) not in (Counted.COMMITTED, Counted.ARRIVING) and each.chunk_id not in free:
            locked.add(each.chunk_id)
        else:
            moves[each.counted, each.now].append(each.copy_id)
    return Recount(_move(session, moves), locked, seen.unmarked)


def _move(session: Session, moves: Mapping[tuple[int, int], Sequence[int]]) -> list[int]:
    """Counts copies as something else, and leaves the difference of the sums. A copy that is gone by now is in no
    sum."""
    sums: Counter[tuple[Any, ...]] = Counter()
    sizes: Counter[tuple[Any, ...]] = Counter()
    moved: list[int] = []
    for (before, now), copy_ids in sorted(moves.items()):
        rows = session.execute(
            update(Copy)
            .where(Copy.id.in_(copy_ids), Copy.counted == before, Copy.state != CopyState.GONE)
            .values(counted=now)
            .returning(Copy.chunk_id, Copy.project_id, Copy.store_id, Copy.storage_class, Copy.stored_bytes),
            execution_options=_UNSYNCHRONIZED,
        )
        for chunk_id, project_id, store_id, storage_class, size in rows:
            for counted, sign in ((before, -1), (now, 1)):
                key = (project_id, store_id, storage_class or "", counted)
                sums[key] += sign
                sizes[key] += sign * size
            moved.append(chunk_id)
    add_deltas(session, {key: (sums[key], sizes[key]) for key in sums})
    return moved


def add_deltas(session: Session, sums: Mapping[tuple[Any, ...], tuple[int, int]]) -> None:
    """By project, store, storage class and count: copies and bytes."""
    names = ("project_id", "store_id", "storage_class", "counted")
    rows = [
        dict(zip(names, key, strict=True)) | {"copies": copies, "bytes": size}
        for key, (copies, size) in sorted(sums.items())
        if copies or size
    ]
    if rows:
        session.execute(insert(ByteDelta), rows)


class Looked(NamedTuple):
    """`counted`: as what the copy is in the sums; `now`: as what it should be."""

    copy_id: int
    chunk_id: int
    counted: int
    now: int


class Look(NamedTuple):
    copies: Sequence[Looked]
    unmarked: Ends


def look(session: Session, keeps: Mapping[int, bool]) -> Look:
    """At all copies of these chunks that are not gone. Pins and holds of what a checkpoint needs are looked for only if
    `keeps` says so or the copy was not counted as needed before: else they are as they were."""
    if not keeps:
        return Look((), {})
    found = session.execute(
        select(Copy.id, Copy.chunk_id, Copy.counted, _tier(), _kept_for())
        .where(Copy.chunk_id.in_(keeps), Copy.state != CopyState.GONE)
        .order_by(Copy.id)
    ).all()
    needed = [row for row in found if row.kept_for in _NEEDED]
    unsure = {row.chunk_id for row in needed if keeps[row.chunk_id] or _why(row.counted) not in _NEEDED}
    kept, unmarked = _kept_by_people(session, unsure)
    copies = [
        Looked(
            row.id,
            row.chunk_id,
            row.counted,
            row.kept_for
            + row.tier
            + (0 if row.kept_for not in _NEEDED else kept.get(row.chunk_id, row.counted & _KEEPS)),
        )
        for row in found
    ]
    return Look(copies, unmarked)


def _why(counted: int) -> int:
    return counted & _WHY


def _tier() -> ColumnElement[int]:
    return case(
        (Copy.state == CopyState.COLD, int(Counted.COLD)),
        (Copy.state == CopyState.THAWING, int(Counted.THAWING)),
        else_=0,
    ).label("tier")


def _kept_for() -> ColumnElement[int]:
    """As `copies/stored_bytes.py` says it of all copies at once; here each ends at the first checkpoint that needs
    it."""
    negotiated = _any(
        ShardChunk.chunk_id == Copy.chunk_id,
        Shard.id == ShardChunk.shard_id,
        Checkpoint.id == Shard.checkpoint_id,
        Checkpoint.state == CheckpointState.UPLOADING,
    )
    return case(
        (Copy.state == CopyState.DELETING, int(Counted.PENDING_COLLECTION)),
        (Copy.state.in_((CopyState.PENDING, CopyState.COPYING)), int(Counted.ARRIVING)),
        (_used(Checkpoint.state == CheckpointState.COMMITTED), int(Counted.COMMITTED)),
        (or_(negotiated, _used(Checkpoint.state == CheckpointState.UPLOADING)), int(Counted.ARRIVING)),
        (_used(Checkpoint.state.in_(_IN_TRASH)), int(Counted.TRASHED)),
        else_=int(Counted.PENDING_COLLECTION),
    ).label("kept_for")


def _used(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return _any(
        ChunkListEntry.chunk_id == Copy.chunk_id,
        Shard.chunk_list_id == ChunkListEntry.chunk_list_id,
        Checkpoint.id == Shard.checkpoint_id,
        condition,
    )


def _any(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """EXISTS, over `copies`, that ends at the first row. Of an EXISTS beside many rows Postgres makes a table of all
    chunks of the catalog that are in use."""
    return select(literal(1)).where(*conditions).limit(1).correlate(Copy).scalar_subquery().is_not(None)


def _kept_by_people(session: Session, chunk_ids: Collection[int]) -> tuple[dict[int, int], Ends]:
    """By chunk id, the flags of pins and holds."""
    now: datetime = database_now(session)
    uses = (
        select(ChunkListEntry.chunk_id, Checkpoint.id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(ChunkListEntry.chunk_id.in_(chunk_ids), Checkpoint.state.in_(_NEEDING))
        .distinct()
    )
    pins = uses.where(pin_in_force(now)), Checkpoint.pinned_until
    holds = uses.join(Hold, Hold.checkpoint_id == Checkpoint.id).where(in_force(now)), Hold.retain_until
    flags: dict[int, int] = dict.fromkeys(chunk_ids, 0)
    unmarked: defaultdict[tuple[str, datetime], set[int]] = defaultdict(set)
    for flag, (kept, end) in ((Counted.PINNED, pins), (Counted.HELD, holds)) if chunk_ids else ():
        for chunk_id, checkpoint_id, until, is_marked in session.execute(kept.add_columns(end, _is_marked(end))):
            flags[chunk_id] |= flag
            if until is not None and not is_marked:
                unmarked[checkpoint_id, until].add(chunk_id)
    return flags, unmarked


def _is_marked(end: InstrumentedAttribute[datetime | None]) -> ColumnElement[bool]:
    """Over `checkpoints`: whether a mark waits for that end, of which nothing was taken up yet."""
    waits = (RecountMark.checkpoint_id == Checkpoint.id, RecountMark.due_at == end, RecountMark.after_shard_id == 0)
    return exists().where(*waits).correlate(Checkpoint, Hold)
