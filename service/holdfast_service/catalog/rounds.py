"""What every controller shares: the report of a round, and how much work is waiting.

A controller is a module with `tick(context) -> RoundReport`, and, where rows of the catalog are its work, with
`backlog(session, context) -> Backlog`. It is registered by one line in `background.rounds_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What one round did. A controller adds fields of its own: numbers, texts and tuples of them.

    `failed` rows stay due; `error` is the last reason, for people.
    """

    done: int = 0
    failed: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Backlog:
    """`due`: rows that wait to be worked on; `leased`: that somebody works on; `oldest_due_at`: since when the oldest
    one waits, None if none does."""

    due: int
    leased: int = 0
    oldest_due_at: datetime | None = None
