"""Chunks that the collector shall look at: whoever takes a reference or a use from a chunk leaves it here, in the same
transaction. What nobody leaves is found by the collector's full look, only later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Select, literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from holdfast_service.catalog.custody_tables import CollectCandidate
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.clock import database_now

_ROWS_PER_STATEMENT = 5000


def leave_candidates(session: Session, chunk_ids: Iterable[int]) -> None:
    """Due at once; one that is there already keeps its time."""
    wanted: Sequence[int] = sorted(set(chunk_ids))
    if not wanted:
        return
    now = database_now(session)
    for first in range(0, len(wanted), _ROWS_PER_STATEMENT):
        portion = wanted[first : first + _ROWS_PER_STATEMENT]
        insert_absent(session, CollectCandidate, [{"chunk_id": chunk_id, "due_at": now} for chunk_id in portion])


def leave_selected(session: Session, chunk_ids: Select[Any]) -> None:
    """The same for what a query finds, without bringing it here: a job's lists may hold millions."""
    found = chunk_ids.distinct().subquery()
    column = next(iter(found.c))
    # Sorted, or two who leave the same chunks would wait for each other in a circle. `true` keeps SQLite's parser from
    # taking ON CONFLICT for a join's ON.
    rows = select(column, literal(database_now(session), CollectCandidate.due_at.type)).where(literal(True))
    rows = rows.order_by(column)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    session.execute(insert(CollectCandidate).from_select(["chunk_id", "due_at"], rows).on_conflict_do_nothing())
