"""A round of healing: another copy for each that was found bad, then the marks of checkpoints that are whole again.

What is bad is healed from any store that has a good copy (mend_chunk.py), or by whoever sends the same digest anew. If
none has, it is itself read again from time to time. A
mark is taken back only when every chunk of the checkpoint that was ever found damaged has a copy that was read since.
The rotten copy itself is left to the collector.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import structlog
from sqlalchemy import and_, exists, func, or_, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.copies import keeps_anywhere
from holdfast_service.catalog.copying import LeaseOverError, StoreFailedError
from holdfast_service.catalog.corruption import heal_if_whole, needed_by_a_checkpoint, read_since_damage
from holdfast_service.catalog.readable import WHOLE
from holdfast_service.catalog.reread import Claim, claim, is_free, let_go
from holdfast_service.catalog.rounds import Backlog, RoundReport
from holdfast_service.catalog.tables import COPY_DAMAGED, Checkpoint, Chunk, ChunkListEntry, Copy, Shard
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.scrub.mend_chunk import HEAL, Damaged, Mended, claim_damaged, look, mend, put_off
from holdfast_service.scrub.read_copies import BATCH, lease, read_one
from holdfast_service.scrub.tally import Tally, keep_totals, total_of
from holdfast_service.stores.base import StoreError

# Rounds of the controllers' pause between two of this one; so long it may take, and then there is no pause.
EVERY_ROUNDS = 12
_PORTION = 50

_log = structlog.get_logger("holdfast.scrub")


@dataclass(frozen=True, kw_only=True)
class HealReport(RoundReport):
    """`lost_copies`: no store has a good one to heal them from now."""

    healed_copies: int = 0
    lost_copies: int = 0
    read_bytes: int = 0
    healed_checkpoints: tuple[str, ...] = ()
    corrupt_checkpoints: tuple[str, ...] = ()


@dataclass
class _Round:
    by_store: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    lost: int = 0
    failed: int = 0
    error: str | None = None

    def fail(self, error: Exception) -> None:
        self.failed += 1
        self.error = str(error)
        _log.warning("not_healed", reason=str(error))


def tick(context: ServiceContext) -> HealReport:
    """Heals for about the interval of its rounds, or until nothing is due."""
    doing = _Round()
    healed: list[str] = []
    ends_at = time.monotonic() + context.settings.controller_interval_seconds * EVERY_ROUNDS
    try:
        _mend_what_is_due(context, doing, ends_at)
        _unmark_what_changed(context, doing, ends_at, healed)
    finally:
        keep_totals(context.database, doing.by_store)
    total = total_of(doing.by_store)
    return HealReport(
        done=total.healed + len(healed),
        failed=doing.failed,
        error=doing.error,
        healed_copies=total.healed,
        lost_copies=doing.lost,
        read_bytes=total.read_bytes,
        healed_checkpoints=tuple(healed),
        corrupt_checkpoints=tuple(sorted(total.marked)),
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    free = is_free(database_now(session))
    due, leased, oldest = session.execute(
        select(func.count().filter(free), func.count().filter(~free), func.min(Copy.bad_at)).where(
            text(f"({COPY_DAMAGED})"), Copy.store_id.in_(context.store_ids), needed_by_a_checkpoint()
        )
    ).one()
    return Backlog(due, leased, oldest)


def _mend_what_is_due(context: ServiceContext, doing: _Round, ends_at: float) -> None:
    store_ids = set(context.store_ids)
    while store_ids and time.monotonic() < ends_at and not context.stopping.is_set():
        damaged = context.database.run(lambda session: _claim_one(session, context, store_ids))
        if damaged is None:
            return
        try:
            tally = doing.by_store[damaged.store_id]
            mended = mend(context, damaged, context.reading_pace.spend, tally)
            if mended is Mended.LOST and damaged.look_is_due:
                mended = look(context, damaged, context.reading_pace.spend, tally)
        except StoreFailedError as error:
            doing.fail(error)
            store_ids.discard(error.store_id)
        except StoreError as error:
            doing.fail(error)
            store_ids.discard(damaged.store_id)
        except LeaseOverError as error:
            doing.fail(error)
        else:
            if mended in (Mended.HEALED, Mended.RETURNED):
                continue
            doing.lost += mended is Mended.LOST
        put_off(context, damaged)


def _claim_one(session: Session, context: ServiceContext, store_ids: set[int]) -> Damaged | None:
    copy = session.scalars(
        select(Copy)
        .where(
            # The text of the partial index, so that it is used.
            text(f"({COPY_DAMAGED})"),
            Copy.store_id.in_(store_ids),
            is_free(database_now(session)),
            needed_by_a_checkpoint(),
        )
        .order_by(Copy.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    ).one_or_none()
    return None if copy is None else claim_damaged(session, context, copy)


def _unmark_what_changed(context: ServiceContext, doing: _Round, ends_at: float, healed: list[str]) -> None:
    """A portion in any case, however long the mending took. A store that fails is asked once."""
    store_ids = set(context.store_ids)
    portion = _changed(context, store_ids, "")
    while portion:
        for checkpoint_id in portion:
            if context.stopping.is_set():
                return
            try:
                if unmark(context, checkpoint_id, doing.by_store, store_ids):
                    healed.append(checkpoint_id)
            except StoreFailedError as error:
                doing.fail(error)
                store_ids.discard(error.store_id)
        if time.monotonic() >= ends_at:
            return
        portion = _changed(context, store_ids, portion[-1])


def _changed(context: ServiceContext, store_ids: Collection[int], after: str) -> list[str]:
    """Corrupt checkpoints at which nobody has looked, or whose chunk that stood in the way is whole now or may be once
    it is read. Whoever looks leaves what stands in the way, so the next process does not repeat it."""
    with context.database.read() as session:
        readable = and_(Copy.store_id.in_(store_ids), Copy.state == CopyState.VERIFIED, is_free(database_now(session)))
        stands_no_more = exists().where(
            Copy.chunk_id == Checkpoint.lost_chunk_id,
            keeps_anywhere(Checkpoint.attempt_id),
            or_(read_since_damage(), readable),
        )
        # The text of the partial index, so that it is used.
        return list(
            session.scalars(
                select(Checkpoint.id)
                .where(
                    text("health = 'corrupt'"),
                    Checkpoint.state.in_(WHOLE),
                    Checkpoint.id > after,
                    or_(Checkpoint.lost_chunk_id.is_(None), stands_no_more),
                )
                .order_by(Checkpoint.id)
                .limit(_PORTION)
            ).all()
        )


def unmark(
    context: ServiceContext, checkpoint_id: str, by_store: dict[int, Tally], store_ids: Collection[int] | None = None
) -> bool:
    """Reads what keeps its damaged chunks and was not read since, from these stores or from all that are attached; then
    takes the mark away if all of them are there. Raises StoreFailedError if a store cannot tell."""
    among = context.store_ids if store_ids is None else store_ids
    while claims := context.database.run(lambda session: _claim_unread(session, context, checkpoint_id, among)):
        for position, claimed in enumerate(claims):
            try:
                tally = read_one(context, claimed, HEAL, context.reading_pace.spend)
            except StoreError as error:
                for left in claims[position:]:
                    let_go(context, left)
                raise StoreFailedError(claimed.store_id, error) from error
            by_store.setdefault(claimed.store_id, Tally()).add(tally)
    with context.database.transaction() as session:
        return heal_if_whole(session, checkpoint_id, actor=HEAL)


def _claim_unread(
    session: Session, context: ServiceContext, checkpoint_id: str, store_ids: Collection[int]
) -> list[Claim]:
    """A batch of the copies that would keep it whole if only they were read: of chunks that have no other that was."""
    attempt_id = session.scalar(select(Checkpoint.attempt_id).where(Checkpoint.id == checkpoint_id))
    if attempt_id is None:
        return []
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    chunks = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    whole = keeps_anywhere(attempt_id)
    read = select(Copy.chunk_id).where(Copy.chunk_id.in_(chunks), whole, read_since_damage()).correlate(None)
    now = database_now(session)
    rows = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            Copy.chunk_id.in_(chunks),
            Copy.store_id.in_(store_ids),
            Copy.state == CopyState.VERIFIED,
            whole,
            ~read_since_damage(),
            Copy.chunk_id.not_in(read),
            is_free(now),
        )
        .order_by(Copy.id)
        .limit(BATCH)
        .with_for_update(of=Copy, skip_locked=True)
    ).all()
    return [claim(session, chunk, copy, now + lease(context), suspect=False) for copy, chunk in rows]
