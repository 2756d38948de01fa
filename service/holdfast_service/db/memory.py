"""What a process remembers of acknowledged changes, and whether the database went back behind it (rule
database-went-back)."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, delete, event, func, insert, literal, select, update
from sqlalchemy.orm import Session

from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.records import HistoryMark
from holdfast_service.errors import WentBackError

if TYPE_CHECKING:
    from holdfast_service.db.engine import Database


# What one process remembers of the changes that the database acknowledged to it (rule database-went-back).
#
# A database that fails over to an older copy of itself forgets such changes and says nothing. So each change that
# people and jobs are told of moves a mark in its own transaction, and the process keeps the mark's number in memory. A
# database whose mark is behind that number has lost an acknowledged change. Postgres replays its log in order: where
# the newest mark is there, everything before it is there.
#
# A transaction has a mark (a slot) to itself while it is under way, so no row is hot. Slots are used again: a process
# has as many as it had transactions at once.

INFO = "holdfast_memory"
"""Under this name a session's `info` holds the memory of its process."""
_PENDING = "holdfast_pending_mark"
_NAMED = 50
_FORGOTTEN_AFTER = timedelta(days=30)
"""A process that lives moves a mark several times a day."""


@dataclass(frozen=True)
class Snapshot:
    """`marks`: the acknowledged number of each slot. `changes`: the newest acknowledged ones, as (slot, number, what
    it was)."""

    memory_id: str
    marks: Mapping[int, int]
    changes: tuple[tuple[int, int, str], ...]

    def lost(self, session: Session) -> list[str] | None:
        """What the database has forgotten, in words, as far as it is known; None if it has forgotten nothing. The
        snapshot must be older than what the session sees."""
        if not self.marks:
            return None
        rows = session.execute(
            select(HistoryMark.slot, HistoryMark.number).where(HistoryMark.memory_id == self.memory_id)
        )
        there = {row.slot: row.number for row in rows}
        if all(there.get(slot, 0) >= number for slot, number in self.marks.items()):
            return None
        return [what for slot, number, what in self.changes if there.get(slot, 0) < number]


@dataclass
class _Pending:
    """The mark of one transaction that is under way."""

    slot: int
    number: int
    what: list[str] = field(default_factory=list)
    is_over: bool = False


class Memory:
    """One per opened database. Thread-safe."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.changed = threading.Event()
        """Set by each acknowledged change; the keeper of the copy beside the data clears it."""
        self.proven_on: str | None = None
        """The server that was seen to have all of it."""
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._issued: dict[int, int] = {}
        self._acknowledged: dict[int, int] = {}
        self._changes: deque[tuple[int, int, str]] = deque(maxlen=_NAMED)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(self.id, dict(self._acknowledged), tuple(self._changes))

    def note(self, session: Session, what: str) -> None:
        """`what` counts as acknowledged once the session has committed. Raises WentBackError where the database has
        forgotten this slot's last change. One that is known to have gone back is not remembered: its original may come
        back, and would lack what people did meanwhile."""
        pending: _Pending | None = session.info.get(_PENDING)
        if pending is None:
            if session.scalar(select(CatalogIdentity.went_back)) is not None:
                return
            pending = self._take(session)
            session.info[_PENDING] = pending
            event.listen(session, "after_commit", lambda _: self._end(pending, acknowledged=True), once=True)
            event.listen(session, "after_rollback", lambda _: self._end(pending, acknowledged=False), once=True)
        pending.what.append(what)

    def _take(self, session: Session) -> _Pending:
        with self._lock:
            slot = self._free.pop() if self._free else len(self._issued) + 1
            # Never issued twice: whether a commit whose reply was lost took place is not known.
            number = self._issued[slot] = self._issued.get(slot, 0) + 1
            acknowledged = self._acknowledged.get(slot, 0)
        if not _move(session, self.id, slot, number, acknowledged):
            # The slot stays out of use, and its number in memory: it is the proof.
            raise WentBackError(self.snapshot().lost(session) or [])
        return _Pending(slot, number)

    def _end(self, pending: _Pending, *, acknowledged: bool) -> None:
        with self._lock:
            if pending.is_over:
                return
            pending.is_over = True
            self._free.append(pending.slot)
            if acknowledged:
                self._acknowledged[pending.slot] = pending.number
                self._changes.extend((pending.slot, pending.number, what) for what in pending.what)
        if acknowledged:
            self.changed.set()


def note_change(session: Session, what: str) -> None:
    """To be called in the transaction of each change that somebody is told of. `what` is for operators. Raises
    WentBackError."""
    memory: Memory = session.info[INFO]
    memory.note(session, what)


def forget_long_gone(session: Session) -> None:
    """Takes away the marks of processes that moved none for a month."""
    newest = func.max(HistoryMark.moved_at)
    gone = (
        select(HistoryMark.memory_id)
        .group_by(HistoryMark.memory_id)
        .having(newest < database_now(session) - _FORGOTTEN_AFTER)
    )
    session.execute(
        delete(HistoryMark).where(HistoryMark.memory_id.in_(gone)),
        execution_options={"synchronize_session": False},
    )


def _move(session: Session, memory_id: str, slot: int, number: int, acknowledged: int) -> bool:
    """Whether the database still has the slot's acknowledged number; the mark stands at `number` then."""
    moved_at = database_now(session)
    moved = session.scalar(
        update(HistoryMark)
        .where(HistoryMark.memory_id == memory_id, HistoryMark.slot == slot, HistoryMark.number >= acknowledged)
        .values(number=number, moved_at=moved_at)
        .returning(HistoryMark.number),
        execution_options={"synchronize_session": False},
    )
    if moved is None and not acknowledged:
        session.execute(insert(HistoryMark).values(memory_id=memory_id, slot=slot, number=number, moved_at=moved_at))
        return True
    return moved is not None


# Whether the database went back to an older state under a service that runs (rule database-went-back).
#
# Each process asks its own memory (`Memory`), and what others have left beside the data (`records/history.py`). What
# one of them finds stands in the catalog's identity, so that all of them refuse: writes of training jobs, the choice of
# a restore point, and deletions. It stays until an operator has compared the catalog with its stores and accepted what
# is lost (`attached_stores/epoch.py`). People can read meanwhile.


def refuse_if_went_back(session: Session) -> None:
    """In a transaction that writes for a training job. Raises WentBackError."""
    memory: Memory = session.info[INFO]
    known = memory.snapshot()
    server = _read(session)
    if server != memory.proven_on:
        _prove(session, memory, known, server)


def prove_history(database: Database) -> str:
    """Outside of any transaction, before something is chosen or deleted: the server that has all that this process
    remembers. Raises WentBackError."""
    known = database.memory.snapshot()  # before the session sees anything
    with database.read() as session:
        server = _read(session)
        _prove(session, database.memory, known, server)
    return server


def _read(session: Session) -> str:
    """Which server answers. Raises WentBackError if a process has found that the database went back."""
    found, server = session.execute(select(CatalogIdentity.went_back, _server(session))).one()
    if found is not None:
        raise WentBackError(found, noticed=True)
    return str(server)


def _prove(session: Session, memory: Memory, known: Snapshot, server: str) -> None:
    lost = known.lost(session)
    if lost is not None:
        raise WentBackError(lost)
    memory.proven_on = server


def _server(session: Session) -> ColumnElement[str]:
    """Another one after each failover, and after each restart of the same."""
    if session.get_bind().dialect.name == "postgresql":
        return func.concat(func.pg_postmaster_start_time(), "")
    return literal("sqlite")
