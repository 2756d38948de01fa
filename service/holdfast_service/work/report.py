"""What every controller shares: its pass, the report of one, and how much work is waiting.

A controller is a function `reconcile(context) -> ReconcileReport`, and, where rows of the catalog are its work, one
`backlog(session, context) -> Backlog`. A room names its own in `loops(settings)` of its `controller.py`, and
`background/registry.py` names the rooms.

A reconcile may run in several processes at once, may be killed after any step, and runs again. A long one looks at
`context.stopping` between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext


@dataclass(frozen=True, kw_only=True)
class ReconcileReport:
    """What one pass did. A controller adds fields of its own: numbers, texts and tuples of them, each with a default
    that says that nothing was done.

    `done` rows are settled, `failed` ones stay due; `error` is the last reason, for people.
    """

    done: int = 0
    failed: int = 0
    error: str | None = None

    @property
    def idle(self) -> bool:
        """Nothing was due."""
        return self == type(self)()


MOST_COUNTED = 10_000
"""So many rows that wait are counted, and no more: to say how many there are must not take longer than to do them."""


def counted(session: Session, waiting: Select[Any]) -> int:
    """How many rows a query finds, up to MOST_COUNTED."""
    return int(session.scalar(select(func.count()).select_from(waiting.limit(MOST_COUNTED).subquery())) or 0)


@dataclass(frozen=True)
class Backlog:
    """`due`: rows that wait to be worked on, where there can be many up to MOST_COUNTED; `leased`: that a process works
    on; `oldest_due_at`: since when the oldest one waits, None if none does."""

    due: int
    leased: int = 0
    oldest_due_at: datetime | None = None


@dataclass(frozen=True)
class ControllerLoop:
    """One controller: its `reconcile` is called, then `interval_seconds` pass.

    Rows that are claimed one by one are worked on in all processes at once, and in `threads` of each. A `sole` pass is
    under way in one process at a time, which holds the controller's lease: that spares work, and is no guard, for a
    process that hangs may go on when its lease is over. An `own` pass looks after its own process: every one does it,
    and it cannot be paused.

    A pass that finds nothing doubles the pause before the next one, up to `longest_pauses` pauses (ADR 0058). For a
    controller that takes a long pause between its passes for a time in which nobody served, they are few.
    """

    name: str
    interval_seconds: float
    reconcile: Callable[[ServiceContext], ReconcileReport]
    backlog: Callable[[Session, ServiceContext], Backlog] | None = None
    sole: bool = False
    own: bool = False
    threads: int = 1
    longest_pauses: int = 12
