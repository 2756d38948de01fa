"""The processes of the service, as each says of itself: registered at its start, seen again and again, and gone.

Silence says that a process was killed, cut off, or hangs. Nothing relies on it but what people are shown, and the
reaper: while no process serves, no rank can call (protocol rule 31).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from holdfast_service.catalog.custody_tables import Worker
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.clock import database_now
from holdfast_service.release import VERSION

ProcessKind = Literal["serve", "worker"]

SILENT_AFTER = timedelta(seconds=45)
"""A process says so every ten seconds at least."""
_FORGOTTEN_AFTER = timedelta(days=1)


def say_alive(session: Session, process_id: str, kind: ProcessKind, stores: Mapping[str, int]) -> None:
    """The first time, and again after a day of sleep, it makes the row. `stores` are those attached, by role."""
    now = database_now(session)
    seen = update(Worker).where(Worker.id == process_id).values(seen_at=now).returning(Worker.id)
    if session.scalar(seen, execution_options={"synchronize_session": False}) is None:
        row = {
            "id": process_id,
            "kind": kind,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": VERSION,
            "started_at": now,
            "seen_at": now,
            "stores": dict(stores),
            "done": {},
        }
        insert_absent(session, Worker, [row])
        _forget_the_long_gone(session, now)


def say_goodbye(session: Session, process_id: str) -> None:
    now = database_now(session)
    session.execute(update(Worker).where(Worker.id == process_id).values(seen_at=now, ended_at=now))


def last_served_at(session: Session) -> datetime | None:
    """When a process that serves was last heard of; None if none has ever said so."""
    return session.scalar(select(func.max(Worker.seen_at)).where(Worker.kind == "serve"))


def _forget_the_long_gone(session: Session, now: datetime) -> None:
    """But for the last one that served: the reaper must know since when nobody does."""
    newest = select(Worker.id).where(Worker.kind == "serve").order_by(Worker.seen_at.desc()).limit(1)
    session.execute(
        delete(Worker).where(Worker.seen_at < now - _FORGOTTEN_AFTER, Worker.id.not_in(newest)),
        execution_options={"synchronize_session": False},
    )
