"""How many transfers may run at once: as many as the store bears. Pure; `pace` waits and counts.

A refusal that asks to slow down halves the number, a stretch of successes adds one (AIMD, as TCP does it: whoever
shares the store with others ends at a fair part of it without knowing them).
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_HOLD_SECONDS = 60.0
PROBE_STRETCHES = 8
"""To come back to the number that was refused last takes so many stretches: what a store bears seldom changes."""


class TransferWindow:
    """Without a limit until the store asks for one. Never below one."""

    def __init__(self, jittered_seconds: Callable[[int], float]) -> None:
        """`jittered_seconds(n)`: a random pause after n refusals in a row."""
        self.limit: int | None = None
        self.cuts = 0
        """How often the limit was halved. A transfer keeps the number that it began with."""
        self._jittered_seconds = jittered_seconds
        self._hold_until = 0.0
        self._refused_at: int | None = None
        self._in_a_row = 0
        self._successes = 0

    def wait_seconds(self, running: int, now: float) -> float | None:
        """How long until one more may begin: 0 is now, None is when one of those that run has ended."""
        if self.limit is not None and running >= self.limit:
            return None
        return max(0.0, self._hold_until - now)

    def refused(self, began_at_cut: int, running: int, now: float, retry_after_seconds: float) -> None:
        """The store asks to slow down. `running` counts the one that was refused.

        One cut per round trip: what began before the last cut could not know of it, and tells nothing new.
        """
        self._hold_until = max(self._hold_until, now + min(retry_after_seconds, LONGEST_HOLD_SECONDS))
        if began_at_cut != self.cuts:
            return
        self._refused_at = running if self.limit is None else min(running, self.limit)
        self.limit = max(1, self._refused_at // 2)
        self.cuts += 1
        self._in_a_row += 1
        self._successes = 0
        self._hold_until = max(self._hold_until, now + self._jittered_seconds(self._in_a_row))

    def succeeded(self, began_at_cut: int, waiting: int) -> None:
        """One has arrived. `waiting`: how many wait for their turn; where none does, more turns would serve nobody."""
        if self.limit is None or began_at_cut != self.cuts:
            return
        self._in_a_row = 0
        if not waiting:
            return
        self._successes += 1
        stretches = PROBE_STRETCHES if self.limit + 1 == self._refused_at else 1
        if self._successes >= self.limit * stretches:
            self.limit += 1
            self._successes = 0
