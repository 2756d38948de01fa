"""The full scan: all copies of a store, then all lists and all chunks, a portion of their ids in each pass, once in a
while.

The transaction that takes a reference away leaves a candidate; this finds the rest: two copies where one is enough,
what a crash between two transactions forgot, what an older version never told of. It only leaves candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, exists, func, or_, select, update
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
_Scanned = Copy | ChunkList | Chunk


@dataclass(frozen=True)
class _Place:
    """Where a scan is: the last id that it has looked at in one of its tables."""

    table: str
    after: int = 0


def look_on(context: ServiceContext, store_id: int) -> None:
    """One portion, if a look is due or under way; tables that end with it are over, and the next one is begun."""
    with context.database.transaction() as session:
        maintenance = _maintenance(session, store_id)
        now = database_now(session)
        if maintenance.scanned_id is None:
            period = timedelta(seconds=context.settings.collect_full_scan_seconds)
            if maintenance.scan_began_at is not None and maintenance.scan_began_at + period > now:
                return
            _set(session, store_id, scan_began_at=now, scanning=_TABLES[0], scanned_id=0)
            place = _Place(_TABLES[0])
        else:
            place = _Place(maintenance.scanning or _TABLES[0], maintenance.scanned_id)
    reached = _look(context, store_id, place)
    while reached is not None and reached.after == 0:
        reached = _look(context, store_id, reached)
    with context.database.transaction() as session:
        # Another process may have looked at the same portion: it is noted once, and both have left the same chunks.
        session.execute(
            update(StoreMaintenance)
            .where(
                StoreMaintenance.store_id == store_id,
                StoreMaintenance.scanning == place.table,
                StoreMaintenance.scanned_id == place.after,
            )
            .values(scanning=reached and reached.table, scanned_id=reached and reached.after)
        )


def look_at_all(context: ServiceContext, store_id: int, on_portion: Callable[[], object]) -> None:
    """The whole scan at once, for a person who asks for it, and once more at what was deferred. `on_portion` is called
    after each portion, and may raise to end it."""
    place: _Place | None = _Place(_TABLES[0])
    while place is not None:
        place = _look(context, store_id, place)
        on_portion()
    with context.database.transaction() as session:
        now = database_now(session)
        session.execute(
            update(CollectCandidate).where(CollectCandidate.due_at > now).values(due_at=now),
            execution_options={"synchronize_session": False},
        )


def _look(context: ServiceContext, store_id: int, place: _Place) -> _Place | None:
    """Looks at the portion behind `place`: where the scan goes on. None at the end of the last table."""
    last = _LOOKS[place.table](context, store_id, place.after)
    if last is not None:
        return _Place(place.table, last)
    position = _TABLES.index(place.table) + 1
    return _Place(_TABLES[position]) if position < len(_TABLES) else None


def _copies(context: ServiceContext, store_id: int, after: int) -> int | None:
    with context.database.read() as session:
        portion = _portion(session, Copy, after, Copy.store_id == store_id)
        question = Question.now_of(session, context, [store_id])
        found = session.scalars(
            select(Copy.chunk_id).where(
                Copy.store_id == store_id,
                Copy.id > after,
                Copy.id <= portion.last,
                or_(question.may_go(), Copy.state == CopyState.GONE),
            )
        ).all()
    if found:  # repeatable: another collector may wait for this one, and this one for candidates that it takes away
        context.database.run(lambda session: leave_candidates(session, found))
    return portion.goes_on_after


def _lists(context: ServiceContext, _store_id: int, after: int) -> int | None:
    """Lists that no shard has."""
    with context.database.read() as session:
        portion = _portion(session, ChunkList, after)
        unused = ~exists().where(Shard.chunk_list_id == ChunkList.id)
        lists = session.scalars(
            select(ChunkList.id).where(ChunkList.id > after, ChunkList.id <= portion.last, unused)
        ).all()
    drop_unused_lists(context, lists)
    return portion.goes_on_after


def _chunks(context: ServiceContext, _store_id: int, after: int) -> int | None:
    """Chunks that have no copy at all."""

    def leave(session: Session) -> _Portion:
        portion = _portion(session, Chunk, after)
        bare = ~exists().where(Copy.chunk_id == Chunk.id)
        leave_selected(session, select(Chunk.id).where(Chunk.id > after, Chunk.id <= portion.last, bare))
        return portion

    return context.database.run(leave).goes_on_after


@dataclass(frozen=True)
class _Portion:
    """`last`: its last id, or where it begins if it is empty."""

    last: int
    is_full: bool

    @property
    def goes_on_after(self) -> int | None:
        """None at the end of the table."""
        return self.last if self.is_full else None


def _portion(session: Session, table: type[_Scanned], after: int, *where: ColumnElement[bool]) -> _Portion:
    ids = select(table.id).where(table.id > after, *where).order_by(table.id).limit(ROWS).subquery()
    last, count = session.execute(select(func.max(ids.c.id), func.count())).one()
    return _Portion(after if last is None else last, count == ROWS)


_LOOKS: dict[str, Callable[[ServiceContext, int, int], int | None]] = {
    "copies": _copies,
    "chunk_lists": _lists,
    "chunks": _chunks,
}
_TABLES = tuple(_LOOKS)


def _maintenance(session: Session, store_id: int) -> StoreMaintenance:
    insert_absent(session, StoreMaintenance, [{"store_id": store_id}])
    return session.get_one(StoreMaintenance, store_id, populate_existing=True)


def _set(session: Session, store_id: int, **values: object) -> None:
    session.execute(
        update(StoreMaintenance).where(StoreMaintenance.store_id == store_id).values(**values),
        execution_options={"synchronize_session": False},
    )
