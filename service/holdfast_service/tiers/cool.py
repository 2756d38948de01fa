"""Goes through a due checkpoint's chunks, a portion at a time: each gets a copy in the colder place, and what has one
loses its hot copy. A checkpoint that was gone through is looked at again a day later: what kept a chunk hot may have
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import structlog
from sqlalchemy import exists, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_service.catalog.copying import (
    CopyFailure,
    LeaseOverError,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
)
from holdfast_service.catalog.tables import TO_COOL, Checkpoint, Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import StoreError
from holdfast_service.tiers.look import could_go, still_there
from holdfast_service.tiers.movable import Place, hotter_copy, in_use, needed_by, place_of, wanted_hotter
from holdfast_service.tiers.move import Made, move_chunk
from holdfast_service.tiers.retire import retire

_CHUNKS_AT_ONCE = 64
# Each may hold a stored chunk in memory.
_THREADS = 4
_AGAIN = timedelta(days=1)
# Somebody reads it, or an upload is under way: that ends by itself, sooner than a day.
_AGAIN_IF_IN_USE = timedelta(minutes=10)

_log = structlog.get_logger("holdfast.tiers")


@dataclass
class Cooled:
    """`moved` are copies made, `retired` hot ones that go."""

    moved: int = 0
    moved_bytes: int = 0
    retired: int = 0
    retired_bytes: int = 0
    failed: int = 0
    error: str | None = None
    away: bool = False
    cold: set[str] = field(default_factory=set)


def due_checkpoints(session: Session, limit: int) -> Sequence[tuple[str, str]]:
    """(id, where it belongs), those that were never gone through first."""
    now = database_now(session)
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.tier_wanted)
        .where(text(TO_COOL), or_(Checkpoint.tier_checked_at.is_(None), Checkpoint.tier_checked_at <= now - _AGAIN))
        .order_by(Checkpoint.tier_checked_at.nulls_first(), Checkpoint.id)
        .limit(limit)
    )
    return [(row.id, row.tier_wanted) for row in rows]


def cool_checkpoint(
    context: ServiceContext,
    checkpoint_id: str,
    target: str,
    *,
    on_bytes: Callable[[int], None],
    go_on: Callable[[], bool],
) -> Cooled:
    """Until all its chunks were looked at, or `go_on` says no: then it stays due."""
    cooled = Cooled()
    place = place_of(context, target)
    if place is None:
        cooled.failed, cooled.error = 1, "No cold store is attached: set HOLDFAST_COLD_STORE, or change the policy."
        return cooled
    after = 0
    while go_on() and not cooled.away:
        with context.database.read() as session:
            chunk_ids = _movable(session, context, checkpoint_id, place, after)
        if not chunk_ids:
            break
        after = chunk_ids[-1]
        made = _move(context, chunk_ids, place, cooled, on_bytes)
        there = made | _look(context, set(chunk_ids) - made.keys(), place, cooled, on_bytes)
        retired = retire(context, there, place)
        cooled.retired += retired.copies
        cooled.retired_bytes += retired.bytes
        cooled.cold.update(retired.cold_checkpoints)
    else:
        return cooled
    if not cooled.failed:
        context.database.run(lambda session: _settle(session, context, checkpoint_id, place))
    return cooled


def _movable(
    session: Session,
    context: ServiceContext,
    checkpoint_id: str,
    place: Place,
    after: int,
) -> list[int]:
    """Chunks behind `after` that nobody wants to be hotter than the place, and that are."""
    statement = (
        select(Chunk.id)
        .where(
            Chunk.id > after,
            needed_by(checkpoint_id),
            exists().where(Copy.chunk_id == Chunk.id, hotter_copy(context, place)),
            ~wanted_hotter(place),
            ~in_use(context, place, database_now(session)),
        )
        .order_by(Chunk.id)
        .limit(_CHUNKS_AT_ONCE)
    )
    return list(session.scalars(statement))


def _move(
    context: ServiceContext, chunk_ids: Sequence[int], place: Place, cooled: Cooled, on_bytes: Callable[[int], None]
) -> dict[int, int]:
    """By chunk, the copy that was made just now."""

    def move(chunk_id: int) -> Made | CopyFailure | None:
        try:
            return move_chunk(context, chunk_id, place, on_bytes)
        except (SourceBadError, TargetBadError, LeaseOverError, StoreFailedError) as failure:
            return failure

    made = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-cool") as threads:
        for outcome in threads.map(move, chunk_ids):
            if isinstance(outcome, Made):
                made[outcome.chunk_id] = outcome.copy_id
                cooled.moved += 1
                cooled.moved_bytes += outcome.bytes
            elif outcome is not None:
                cooled.failed += 1
                cooled.error = str(outcome)
                cooled.away = cooled.away or isinstance(outcome, StoreFailedError)
                _log.warning("move_failed", place=place.target, reason=str(outcome))
    return made


def _look(
    context: ServiceContext, chunk_ids: Collection[int], place: Place, cooled: Cooled, on_bytes: Callable[[int], None]
) -> dict[int, int]:
    """By chunk, the copy that is in the place from before, and is still good. What is not is marked."""
    there: dict[int, int] = {}
    if cooled.away or not chunk_ids:
        return there
    with context.database.read() as session:
        waiting = could_go(session, context, chunk_ids, place)
    for chunk_id in waiting:
        try:
            copy_id = still_there(context, chunk_id, place, on_bytes)
        except StoreError as error:
            cooled.failed, cooled.error, cooled.away = cooled.failed + 1, str(error), True
            _log.warning("place_not_asked", place=place.target, reason=str(error))
            break
        if copy_id is not None:
            there[chunk_id] = copy_id
    return there


def _settle(session: Session, context: ServiceContext, checkpoint_id: str, place: Place) -> None:
    """All of it was looked at. What is only in use, or being moved by another process, makes it due again sooner."""
    now = database_now(session)
    waits = session.scalar(
        select(
            exists().where(
                needed_by(checkpoint_id),
                Copy.chunk_id == Chunk.id,
                hotter_copy(context, place),
                ~wanted_hotter(place),
            )
        )
    )
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.tier_wanted == place.target)
        .values(tier_checked_at=now - _AGAIN + _AGAIN_IF_IN_USE if waits else now),
        execution_options={"synchronize_session": False},
    )
