"""Marks copies as `deleting`, deletes their bytes, and drops the rows of what is gone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.collect.garbage import THERE, UNWRITTEN, Question
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import leave_candidates, object_key
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import note_change, refuse_if_went_back
from holdfast_service.db.tables.core import Chunk, ChunkListEntry, Copy, ShardChunk
from holdfast_service.db.tables.operations import CollectCandidate
from holdfast_service.stores.base import ObjectKey, StoreError

BATCH = 200
# What is not needed and cannot go yet is checked again after so long, or when its tickets are waited out; what only
# stores have that are unavailable, foreign or not attached any more waits longer.
_AGAIN = timedelta(seconds=60)
_AGAIN_ELSEWHERE = timedelta(hours=1)
_UNSYNCHRONIZED = {"synchronize_session": False}


@dataclass(frozen=True)
class Doomed:
    """A copy that this process deletes under a lease."""

    copy_id: int
    chunk_id: int
    store_id: int
    key: ObjectKey
    version_id: str | None
    stored_bytes: int
    lease_token: str


@dataclass(frozen=True)
class Marked:
    doomed: list[Doomed]
    forgotten_chunks: int = 0
    looked_at: int = 0


def mark(session: Session, context: ServiceContext, store_ids: Collection[int]) -> Marked:
    """Marks copies as `deleting` and drops chunks that are gone, in one transaction (rule mark-before-delete): at most
    BATCH candidates and BATCH unfinished uploads; and what a process that died had marked.

    The order is the guard: the chunks are locked FOR UPDATE, without waiting, which a writer's FOR KEY SHARE excludes;
    then their copies, which holds off a process that reads one again; what may go is asked in a LATER statement, which
    sees what the others committed; the mark is committed; only then do bytes go.
    """
    refuse_if_went_back(session)
    question = Question.now_of(session, context, store_ids)
    candidates = _due_candidates(session, question)
    wanted = {*candidates, *_unwritten(session, question)}
    doomed, forgotten = _look_at(session, context, question, candidates, wanted) if wanted else ([], 0)
    doomed += _claim(session, context, question, _left_by_the_dead(session, question))
    leave_candidates(session, {each.chunk_id for each in doomed})
    if doomed:
        note_change(session, f"{len(doomed)} copies were marked for deletion")
    return Marked(doomed, forgotten, len(candidates))


def _look_at(
    session: Session, context: ServiceContext, question: Question, candidates: Sequence[int], wanted: Collection[int]
) -> tuple[list[Doomed], int]:
    """What is marked now, and how many chunks went."""
    locked = session.scalars(
        select(Chunk.id).where(Chunk.id.in_(wanted)).order_by(Chunk.digest).with_for_update(skip_locked=True)
    ).all()
    # A report that reads one of them again decides about the others too: it comes before this, or after.
    session.execute(select(Copy.id).where(Copy.chunk_id.in_(locked)).order_by(Copy.id).with_for_update()).all()
    # A statement of its own: the ones above may have taken their snapshot before the last reference was committed.
    rows = _copies(session, Copy.chunk_id.in_(locked) & question.may_go())
    doomed = _claim(session, context, question, rows)
    return doomed, _settle_candidates(session, question, candidates, locked)


def _due_candidates(session: Session, question: Question) -> list[int]:
    return list(
        session.scalars(
            select(CollectCandidate.chunk_id)
            .where(CollectCandidate.due_at <= question.now)
            .order_by(CollectCandidate.due_at, CollectCandidate.chunk_id)
            .limit(BATCH)
            .with_for_update(skip_locked=True)
        )
    )


def _unwritten(session: Session, question: Question) -> list[int]:
    """There are never many of them: those of uploads and copies under way, and of those that were given up."""
    condition = question.may_go() & Copy.state.in_(UNWRITTEN)
    return list(session.scalars(select(Copy.chunk_id).where(condition).order_by(Copy.id).limit(BATCH)).unique())


def _left_by_the_dead(session: Session, question: Question) -> Sequence[tuple[Copy, str]]:
    over = lease.has_run_out(Copy.leased_until, question.now)
    return _copies(session, Copy.store_id.in_(question.store_ids) & (Copy.state == CopyState.DELETING) & over)


def _copies(session: Session, condition: ColumnElement[bool]) -> Sequence[tuple[Copy, str]]:
    statement = (
        select(Copy, Chunk.digest)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(condition)
        .order_by(Copy.id)
        .limit(BATCH)
        .with_for_update(of=Copy, skip_locked=True)
    )
    return [(row.Copy, row.digest) for row in session.execute(statement)]


def _claim(
    session: Session, context: ServiceContext, question: Question, rows: Sequence[tuple[Copy, str]]
) -> list[Doomed]:
    token = lease.claim_locked(session, *(copy for copy, _ in rows), seconds=context.settings.lease_seconds)
    doomed = []
    for copy, digest in rows:
        copy.state = CopyState.DELETING
        key = object_key(copy.project_id, digest, copy)
        doomed.append(Doomed(copy.id, copy.chunk_id, copy.store_id, key, copy.version_id, copy.stored_bytes, token))
    session.flush()
    return doomed


def _settle_candidates(session: Session, question: Question, candidates: Sequence[int], locked: Sequence[int]) -> int:
    """A candidate that is needed is none any more, and a chunk of which nothing is left goes. How many chunks went."""
    used_up = exists().where(ShardChunk.copy_id == Copy.id)
    session.execute(
        delete(Copy).where(Copy.chunk_id.in_(locked), Copy.state == CopyState.GONE, ~used_up),
        execution_options=_UNSYNCHRONIZED,
    )
    bare = ~(
        exists().where(Copy.chunk_id == Chunk.id)
        | exists().where(ShardChunk.chunk_id == Chunk.id)
        | exists().where(ChunkListEntry.chunk_id == Chunk.id)
    )
    # Behind the lock: a negotiation takes the row FOR KEY SHARE before it refers to it.
    forgotten = session.scalars(select(Chunk.id).where(Chunk.id.in_(locked), bare)).all()
    session.execute(delete(Chunk).where(Chunk.id.in_(forgotten)), execution_options=_UNSYNCHRONIZED)
    needed = session.scalars(select(Chunk.id).where(Chunk.id.in_(locked), question.chunk_is_needed(Chunk.id))).all()
    there = session.scalars(select(Chunk.id).where(Chunk.id.in_(candidates))).all()
    over = (set(candidates) - set(there)) | set(needed)
    session.execute(
        delete(CollectCandidate).where(CollectCandidate.chunk_id.in_(over)), execution_options=_UNSYNCHRONIZED
    )
    _defer(session, question, set(candidates) - over, set(locked))
    return len(forgotten)


def _defer(session: Session, question: Question, chunk_ids: Collection[int], locked: Collection[int]) -> None:
    if not chunk_ids:
        return
    tickets = session.execute(
        select(Copy.chunk_id, func.max(Copy.ticket_expires_at))
        .where(Copy.chunk_id.in_(chunk_ids), Copy.store_id.in_(question.store_ids), Copy.state.in_(THERE))
        .group_by(Copy.chunk_id)
    )
    soon = question.now + _AGAIN
    waited_out_at = {chunk_id: max(soon, ticket + question.longest_upload) for chunk_id, ticket in tickets}
    session.execute(
        update(CollectCandidate),
        [
            {
                "chunk_id": chunk_id,
                "due_at": waited_out_at.get(chunk_id, question.now + _AGAIN_ELSEWHERE) if chunk_id in locked else soon,
            }
            for chunk_id in sorted(chunk_ids)
        ],
    )


_AT_ONCE = 8
_RETRY_IF_UNAVAILABLE = timedelta(seconds=30)
# A lock ends by a date or by a person: neither is a matter of seconds.
_AGAIN_IF_REFUSED = timedelta(hours=1)

_log = logging.getLogger(__name__)


@dataclass
class Deleted:
    """What went, and what did not: `problems` by store, the last reason of each."""

    copies: int = 0
    bytes: int = 0
    kept: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    unavailable: dict[int, StoreError] = field(default_factory=dict)

    def add(self, other: Deleted) -> None:
        self.copies += other.copies
        self.bytes += other.bytes
        self.kept += other.kept
        self.problems |= other.problems
        self.unavailable |= other.unavailable


def delete_marked(context: ServiceContext, doomed: Sequence[Doomed]) -> Deleted:
    """Deletes the bytes of marked copies, as far as their stores let them go now, and settles them as `gone`.

    No transaction is open meanwhile. A process that dies in between leaves `deleting` rows, which are taken up again
    when their lease has run out. Deleting twice is fine: a key is never used again. What a store does not delete
    now stays marked: an unavailable store alone is waited for; what it refuses (Object Lock) is tried again later.
    """
    result = Deleted()
    if not doomed:
        return result
    with ThreadPoolExecutor(min(_AT_ONCE, len(doomed)), thread_name_prefix="holdfast-delete") as threads:
        failures = list(threads.map(lambda each: _delete(context, each, result.unavailable), doomed))
    gone = [each for each, failure in zip(doomed, failures, strict=True) if failure is None]
    left = [(each, failure) for each, failure in zip(doomed, failures, strict=True) if failure is not None]
    result.copies, result.bytes, result.kept = len(gone), sum(each.stored_bytes for each in gone), len(left)
    result.problems = {each.store_id: str(failure) for each, failure in left}
    _settle(context, gone, left)
    return result


def _delete(context: ServiceContext, doomed: Doomed, unavailable: dict[int, StoreError]) -> StoreError | None:
    store = context.store_of(doomed.store_id)
    assert store is not None  # only what is attached is marked
    if doomed.store_id in unavailable:
        return unavailable[doomed.store_id]
    try:
        # What a ticket could overwrite may have versions that no row knows: they go as well.
        store.delete(doomed.key, None if doomed.key.version_id else doomed.version_id)
    except StoreError as error:
        if error.retryable:
            unavailable[doomed.store_id] = error
        _log.warning("the store does not delete %s: %s", doomed.key.path, error)
        return error
    return None


def _settle(context: ServiceContext, gone: Sequence[Doomed], left: Sequence[tuple[Doomed, StoreError]]) -> None:
    """Repeatable."""
    context.database.run(lambda session: _write_outcome(session, gone, left))


def _write_outcome(session: Session, gone: Sequence[Doomed], left: Sequence[tuple[Doomed, StoreError]]) -> None:
    """Locks candidates before copies, as `mark` does: another collector may be at the same chunk."""
    now = database_now(session)
    session.execute(
        update(CollectCandidate)
        .where(CollectCandidate.chunk_id.in_({each.chunk_id for each in gone}))
        .values(due_at=now),
        execution_options=_UNSYNCHRONIZED,
    )
    # Deleted twice is deleted: a process that took it up after this lease ended finds it gone, and does no harm.
    session.execute(
        update(Copy)
        .where(Copy.id.in_([each.copy_id for each in gone]), Copy.state == CopyState.DELETING)
        .values(state=CopyState.GONE, **lease.ended()),
        execution_options=_UNSYNCHRONIZED,
    )
    for each, failure in left:
        again = _RETRY_IF_UNAVAILABLE if failure.retryable else _AGAIN_IF_REFUSED
        lease.give_back(session, Copy, each.lease_token, Copy.id == each.copy_id, until=now + again)
