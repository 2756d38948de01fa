"""How many tickets of a project are in flight: handed out, not expired, and their chunk not verified yet.

The copies' rows say it, so it is the same for all processes and nothing can drift. They are counted seldom: a process
counts once it has handed out a sixteenth of the limit since it counted last, so the limit is exceeded by about that
much for each process.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Copy, Project
from holdfast_service.errors import ProblemError

_COUNTED_AFTER = 16
_AGAIN_AFTER_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 5


@dataclass
class _Known:
    in_flight: int = 0
    handed_out: int = 0
    """Since they were counted."""
    counted_at: float = float("-inf")


class TicketsInFlight:
    """What one process knows of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._projects: dict[str, _Known] = {}

    def hand_out(self, session: Session, project: Project, wanted: int, most: int) -> None:
        """Called before so many tickets are made. A project that has none in flight may have any number. Raises
        `rate_limited`."""
        with self._lock:
            known = self._projects.setdefault(project.id, _Known())
            full = known.in_flight + wanted > most and known.in_flight > 0
            stale = time.monotonic() - known.counted_at > _AGAIN_AFTER_SECONDS
            count = stale if full else (known.handed_out + wanted) * _COUNTED_AFTER > most
        in_flight = _in_flight(session, project.id, most) if count else None
        with self._lock:
            if in_flight is not None:
                known.in_flight, known.handed_out, known.counted_at = in_flight, 0, time.monotonic()
            if known.in_flight + wanted > most and known.in_flight > 0:
                raise ProblemError(
                    ProblemCode.RATE_LIMITED,
                    f"{known.in_flight} chunks of the project {project.name!r} are being sent, and "
                    f"HOLDFAST_PROJECT_TICKETS allows {most}. Try again in {_RETRY_AFTER_SECONDS} s.",
                    limit="HOLDFAST_PROJECT_TICKETS",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            known.handed_out += wanted


def _in_flight(session: Session, project_id: str, most: int) -> int:
    """No more than `most` are counted."""
    pending = (
        select(Copy.id)
        .where(
            Copy.project_id == project_id,
            Copy.state == CopyState.PENDING,
            Copy.ticket_expires_at > database_now(session),
        )
        .limit(most)
    )
    return session.execute(select(func.count()).select_from(pending.subquery())).scalar_one()
