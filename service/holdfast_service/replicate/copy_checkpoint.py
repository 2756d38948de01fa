"""One checkpoint's missing chunks go to a second store, chunk by chunk under leases: any number of workers share it.

The checkpoint is whole there when the catalog says so of each of its chunks, asked again after the last one: what
this process believes to have written counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy import Select, exists, func, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, CopyState, Health, StoreRole
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.copies.copy_chunk import (
    CopyTask,
    LeaseOverError,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
    begin_copy,
    copy_now,
)
from holdfast_service.copies.predicates import is_in
from holdfast_service.copies.read_back import pause_before_look
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, Run, Shard
from holdfast_service.db.tables.operations import TO_COPY, CheckpointCopy
from holdfast_service.records.outbox import record_in_store


def due(store_id: int, now: datetime) -> Select[CheckpointCopy, Checkpoint]:
    """What is due, the newest commit first: what would be lost then shrinks fastest. A corrupt one has nothing to copy
    from."""
    return (
        select(CheckpointCopy, Checkpoint)
        .join(Checkpoint, Checkpoint.id == CheckpointCopy.checkpoint_id)
        .where(
            CheckpointCopy.store_id == store_id,
            text(f"({TO_COPY})"),
            lease.is_free(CheckpointCopy.retry_at, now),
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.health != Health.CORRUPT,
        )
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.id)
    )


def chunks_to_take(
    session: Session, checkpoint_id: str, store_id: int, now: datetime, *, passed: Collection[int], most: int
) -> Sequence[int]:
    """Ids of chunks that the store lacks and no process copies there, by digest; not those in `passed`."""
    taken = aliased(Copy)
    at_work = exists().where(
        taken.chunk_id == Chunk.id,
        taken.store_id == store_id,
        taken.state == CopyState.COPYING,
        ~lease.is_free(taken.leased_until, now),
    )
    return session.scalars(
        _lacking(checkpoint_id, store_id)
        .with_only_columns(Chunk.id)
        .where(~at_work, Chunk.id.not_in(passed))
        .order_by(Chunk.digest)
        .limit(most)
    ).all()


def missing_bytes(session: Session, checkpoint_id: str, store_id: int) -> tuple[int, int]:
    """How many distinct chunks of the checkpoint the store lacks, and their bytes."""
    lacking = _lacking(checkpoint_id, store_id).with_only_columns(Chunk.id, Chunk.bytes).subquery()
    count, size = session.execute(select(func.count(), func.sum(lacking.c.bytes)).select_from(lacking)).one()
    return int(count), int(size or 0)


def _lacking(checkpoint_id: str, store_id: int) -> Select[int]:
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    needed = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    return select(Chunk.id).where(Chunk.id.in_(needed), ~is_in(store_id, Chunk.id))


_CHUNKS_AT_ONCE = 64
# Each holds a stored chunk in memory.
_THREADS = 4
# What could not be copied is not tried in each pass: it would be told again and again, and hold up the others.
RETRY_SECONDS = 60
ACTOR = Actor.controller("replicate")

_log = structlog.get_logger("holdfast.replicate")


@dataclass
class Copied:
    """`refused`: chunks that another process works on, or that no copy gives now. `target_failed`: the second store did
    not take a chunk; nothing else is to be tried there now. `store_unavailable`: one of the stores, the source perhaps,
    does not answer."""

    chunks: int = 0
    bytes: int = 0
    refused: int = 0
    failed: int = 0
    error: str | None = None
    target_failed: bool = False
    store_unavailable: bool = False
    whole: bool = False

    def add(self, other: Copied) -> None:
        self.chunks += other.chunks
        self.bytes += other.bytes
        self.refused += other.refused
        self.failed += other.failed
        self.error = other.error or self.error
        self.target_failed = self.target_failed or other.target_failed


def copy_checkpoint(
    context: ServiceContext,
    target: AttachedStore,
    checkpoint_id: str,
    *,
    on_bytes: Callable[[int], None],
    go_on: Callable[[], bool],
) -> Copied:
    """Until nothing is left that this process can take, or `go_on` says no. Settles the checkpoint's row.

    The first chunk is tried before `go_on` is asked: a pass whose time is over when it has found its work would never
    do any, and would look like one that had nothing to do."""
    copied = Copied()
    passed: set[int] = set()
    first: int | None = None

    def take(chunk_id: int) -> Copied:
        if copied.target_failed or not (chunk_id == first or go_on()):
            return Copied()
        return _copy_chunk(context, target, chunk_id, on_bytes)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-copy") as threads:
        while first is None or (go_on() and not copied.target_failed):
            with context.database.read() as session:
                now = database_now(session)
                chunk_ids = chunks_to_take(
                    session, checkpoint_id, target.store_id, now, passed=passed, most=_CHUNKS_AT_ONCE
                )
            if not chunk_ids:
                break
            first = first or chunk_ids[0]
            passed.update(chunk_ids)
            for each in threads.map(take, chunk_ids):
                copied.add(each)
    for attached in context.stores:
        if attached.watch.unavailable:
            copied.store_unavailable = True
            if copied.refused:
                copied.error = copied.error or f"The {attached.role} store is unavailable: {attached.watch.reason}"
    context.database.run(lambda session: _settle(session, target, checkpoint_id, copied))
    return copied


def _copy_chunk(
    context: ServiceContext, target: AttachedStore, chunk_id: int, on_bytes: Callable[[int], None]
) -> Copied:
    def begin(session: Session) -> CopyTask | str | None:
        return _spoiled_lately(session, chunk_id, target) or begin_copy(session, context, chunk_id, target.store_id)

    task = context.database.run(begin)
    if task is None or isinstance(task, str):
        return Copied(refused=1, error=task)
    try:
        settled = copy_now(context, task, on_bytes)
    except LeaseOverError as failure:
        _log.warning("copy_too_slow", digest=task.digest, store=target.role.value)
        return Copied(error=str(failure))
    except (SourceBadError, TargetBadError) as failure:
        _log.warning("copy_failed", digest=task.digest, store=target.role.value, reason=str(failure))
        return Copied(failed=1, error=str(failure))
    except StoreFailedError as failure:
        [failed] = [attached for attached in context.stores if attached.store_id == failure.store_id]
        failed.watch.doubt()
        return Copied(failed=1, error=f"The {failed.role} store: {failure}", target_failed=failed is target)
    if not settled:
        _log.warning("copy_too_slow", digest=task.digest, store=target.role.value)
        return Copied(error=f"the chunk {task.digest} took longer to copy than its lease")
    return Copied(chunks=1, bytes=task.stored_bytes)


def _spoiled_lately(session: Session, chunk_id: int, target: AttachedStore) -> str | None:
    """Why the chunk is not to be written there now: what was written before is not what the store has. Each try leaves
    an object for the collector, whatever checkpoint it was for. One may be an accident; after more the pause grows."""
    spoiled, newest = session.execute(
        select(func.count(), func.max(Copy.created_at)).where(
            Copy.chunk_id == chunk_id,
            Copy.store_id == target.store_id,
            Copy.state == CopyState.BAD,
            Copy.bad_at.is_(None),  # what was good once and then rotted is a repair
        )
    ).one()
    # What is dated later than now a clock has written that was ahead.
    if spoiled < 2 or not newest <= (now := database_now(session)) < newest + (pause := pause_before_look(spoiled - 1)):
        return None
    return (
        f"The {target.role} store has spoiled a chunk {spoiled} times: what it has is not what was written. The next "
        f"try is in {round((newest + pause - now).total_seconds())} s."
    )


def _settle(session: Session, target: AttachedStore, checkpoint_id: str, copied: Copied) -> None:
    # First, as everywhere: a purge holds it, and afterwards no record may come back (rule record-outbox).
    state = session.scalar(
        select(Checkpoint.state).where(Checkpoint.id == checkpoint_id).with_for_update(key_share=True)
    )
    if state not in (CheckpointState.COMMITTED, CheckpointState.TRASHED):
        return
    count, size = missing_bytes(session, checkpoint_id, target.store_id)
    row = session.execute(
        select(CheckpointCopy)
        .where(CheckpointCopy.checkpoint_id == checkpoint_id, CheckpointCopy.store_id == target.store_id)
        .with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one_or_none()
    if row is None:
        return
    row.missing_bytes = size
    row.error = copied.error
    if count:
        # Where nothing that was tried could be taken: not again at once. Each pass looks at a store that is
        # unavailable, and when it is back all of it is due.
        passing = (
            copied.chunks > 0 or copied.refused + copied.failed == 0 or copied.target_failed or copied.store_unavailable
        )
        if not passing and row.error is None and _can_be_taken(session, target, checkpoint_id):
            row.error = (
                "No copy of a chunk that the second store lacks can be read now: it is cold, suspect, or its store is "
                "unavailable."
            )
        row.retry_at = None if passing else database_now(session) + timedelta(seconds=RETRY_SECONDS)
        return
    row.retry_at = None
    copied.whole = True
    if row.complete_at is None:
        row.complete_at = database_now(session)
        record_in_store(session, checkpoint_id, target.store_id)
        _say_whole(session, checkpoint_id, target.role)


def _can_be_taken(session: Session, target: AttachedStore, checkpoint_id: str) -> bool:
    """Whether a chunk is missing that no process works on."""
    now = database_now(session)
    return bool(chunks_to_take(session, checkpoint_id, target.store_id, now, passed=(), most=1))


def _say_whole(session: Session, checkpoint_id: str, role: StoreRole) -> None:
    run_id, project_id, step = session.execute(
        select(Run.id, Run.project_id, Checkpoint.step)
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .where(Checkpoint.id == checkpoint_id)
    ).one()
    record_event(
        session,
        ACTOR,
        "checkpoint.copy",
        project_id=project_id,
        run_id=run_id,
        checkpoint_id=checkpoint_id,
        reason=f"a policy asks for a copy of step {step} in the {role.value} store",
        after={"store": role.value},
    )
