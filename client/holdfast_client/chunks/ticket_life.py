"""How long a ticket may be used, counted on this machine's monotonic clock (protocol rule 31)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_client.errors import TicketExpired, TicketProblem

USED_PART = 0.9
"""A transfer that begins in the last tenth of a ticket's life could end after it."""

WAITS_PER_CHUNK = 20
"""How often a chunk may miss its turn. More often, and the tickets are dead when they come."""


class TicketWaitedTooLong(TicketExpired):
    """Its turn came too late. Nobody has refused anything, so this is no reason to give up."""


class TicketLife:
    def __init__(self, expires_in_seconds: int) -> None:
        self._ends = time.monotonic() + expires_in_seconds * USED_PART

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around a transfer. Raises TicketWaitedTooLong if it begins or is refused when the time is over; in a store
        that is slow or away a ticket dies between two tries, and that says nothing against the next one."""
        self._check()
        try:
            yield
        except TicketProblem:
            self._check()
            raise

    def _check(self) -> None:
        if time.monotonic() >= self._ends:
            raise TicketWaitedTooLong("The ticket's time was over before its turn came")
