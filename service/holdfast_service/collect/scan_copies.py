"""The full scan: all copies of a store, a portion of their ids in each pass, once in a while.

The transaction that takes a reference away leaves a candidate; this finds the rest: two copies where one is enough,
what a crash between two transactions forgot, what an older version never told of. It only leaves candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import exists, func, or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.collect.garbage import Question
from holdfast_service.collect.references import drop_unused_lists
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import leave_candidates, leave_selected
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Chunk, ChunkList, Copy, Shard
from holdfast_service.db.tables.operations import CollectCandidate, StoreMaintenance

ROWS = 20_000


def look_on(context: ServiceContext, store_id: int) -> None:
    """One portion, if a look is due or under way."""
    with context.database.transaction() as session:
        maintenance = _maintenance(session, store_id)
        now = database_now(session)
        if maintenance.scanned_copy_id is None:
            period = timedelta(seconds=context.settings.collect_full_scan_seconds)
            if maintenance.scan_began_at is not None and maintenance.scan_began_at + period > now:
                return
            _set(session, store_id, scan_began_at=now, scanned_copy_id=0)
        after = maintenance.scanned_copy_id or 0
    last = _look(context, store_id, after)
    with context.database.transaction() as session:
        # Another process may have looked at the same portion: it is noted once, and both have left the same chunks.
        session.execute(
            update(StoreMaintenance)
            .where(StoreMaintenance.store_id == store_id, StoreMaintenance.scanned_copy_id == after)
            .values(scanned_copy_id=last)
        )


def look_at_all(context: ServiceContext, store_id: int, on_portion: Callable[[], object]) -> None:
    """The whole scan at once, for a person who asks for it, and once more at what was deferred. `on_portion` is called
    after each portion, and may raise to end it."""
    after: int | None = 0
    while after is not None:
        after = _look(context, store_id, after)
        on_portion()
    with context.database.transaction() as session:
        now = database_now(session)
        session.execute(
            update(CollectCandidate).where(CollectCandidate.due_at > now).values(due_at=now),
            execution_options={"synchronize_session": False},
        )


def _look(context: ServiceContext, store_id: int, after: int) -> int | None:
    """Looks at the copies behind `after`: the last id of the portion, None if it was the last one."""
    with context.database.read() as session:
        portion = (
            select(Copy.id).where(Copy.id > after, Copy.store_id == store_id).order_by(Copy.id).limit(ROWS).subquery()
        )
        last: int | None = session.scalar(select(func.max(portion.c.id)))
        found: list[int] = []
        if last is not None:
            question = Question.now_of(session, context, [store_id])
            found = list(
                session.scalars(
                    select(Copy.chunk_id).where(
                        Copy.store_id == store_id,
                        Copy.id > after,
                        Copy.id <= last,
                        or_(question.may_go(), Copy.state == CopyState.GONE),
                    )
                )
            )
    if found:
        with context.database.transaction() as session:
            leave_candidates(session, found)
    if last is None:
        _look_beside_copies(context)
    return last


def _look_beside_copies(context: ServiceContext) -> None:
    """Lists that no shard has, and chunks that have no copy at all."""
    with context.database.read() as session:
        lists = list(session.scalars(select(ChunkList.id).where(~exists().where(Shard.chunk_list_id == ChunkList.id))))
    drop_unused_lists(context, lists)
    with context.database.transaction() as session:
        leave_selected(session, select(Chunk.id).where(~exists().where(Copy.chunk_id == Chunk.id)))


def _maintenance(session: Session, store_id: int) -> StoreMaintenance:
    insert_absent(session, StoreMaintenance, [{"store_id": store_id}])
    return session.get_one(StoreMaintenance, store_id, populate_existing=True)


def _set(session: Session, store_id: int, **values: object) -> None:
    session.execute(
        update(StoreMaintenance).where(StoreMaintenance.store_id == store_id).values(**values),
        execution_options={"synchronize_session": False},
    )
