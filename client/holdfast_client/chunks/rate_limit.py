"""How fast this process may move chunks: transfers at once, as the store bears them, and bytes per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_client.transport import Backoff, check_stop, jittered_seconds

# A limit on bytes per second, as a schedule: each slice gets the moment at which it may move. Pure; `pace` waits.

BURST_SECONDS = 0.25
"""What was not used is kept for so long: a pause is no licence to flood the line afterwards."""

SLICES_PER_SECOND = 64
"""A slice is at most this part of a second's bytes, so that none of many transfers is silent for so long that the store
hangs up."""
SMALLEST_SLICE_BYTES = 4096


class ByteRate:
    def __init__(self, bytes_per_second: int, now: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = now
        self.slice_bytes = max(SMALLEST_SLICE_BYTES, bytes_per_second // SLICES_PER_SECOND)

    def acquire(self, count_bytes: int, now: float) -> float:
        """How many seconds from now on the bytes may move. Whoever asks first goes first."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + count_bytes / self._bytes_per_second
        return max(0.0, begin - now)


# How many transfers may run at once: as many as the store bears. Pure; `pace` waits and counts.
#
# A refusal that asks to slow down halves the number, a stretch of successes adds one (AIMD, as TCP does it: whoever
# shares the store with others ends at a fair part of it without knowing them).

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


# How fast this process may move chunks: turns, as the store bears them, and bytes per second, as the user sets them.
#
# One per TransferPool, shared by all its uploads and downloads. What is decided stands in `window` and `byte_rate`;
# here are the lock, the clock and the waiting. Costs nothing where there is no limit.

_LOOK_SECONDS = 0.1
"""A stop event cannot wake a waiter of a condition; so often it is looked at."""

SLOW_DOWN_STATUSES = frozenset({429, 503})


@dataclass
class Permit:
    """One transfer's try, and what the store has answered; without a status the connection broke before it did."""

    status: int | None = None
    retry_after_seconds: float = 0.0
    ended: bool = False
    """The transfer has read the answer to its end."""
    timed_out: bool = False
    """The connection stood, and no answer came: a store that has too much to do and does not say so."""


class RateLimit:
    def __init__(self, bytes_per_second: int | None = None) -> None:
        self._window = TransferWindow(jittered_seconds)
        self._rate = None if bytes_per_second is None else ByteRate(bytes_per_second, time.monotonic())
        self._rate_lock = threading.Lock()
        self._changed = threading.Condition()
        self._running = self._waiting = self._successes = 0

    def beside(self) -> RateLimit:
        """For another store: its own turns, under the same limit on bytes."""
        other = RateLimit()
        other._rate, other._rate_lock = self._rate, self._rate_lock
        return other

    @property
    def limit(self) -> int | None:
        """How many transfers may run at once now; None: the store has not asked for a limit."""
        return self._window.limit

    @contextmanager
    def permit(self, stop: threading.Event | None, backoff: Backoff | None) -> Iterator[Permit]:
        """Waits for a permit, then counts how it ended. `backoff` is not charged for a wait in which others got
        through. Raises TransferStopped."""
        began_at_cut = self._enter(stop, backoff)
        permit = Permit()
        try:
            yield permit
            permit.ended = True
        finally:
            self._leave(began_at_cut, permit)

    def slice_bytes(self, most: int) -> int:
        """How many bytes to move at once: `most`, or fewer where the rate is low."""
        return most if self._rate is None else min(most, self._rate.slice_bytes)

    def acquire(self, count_bytes: int, stop: threading.Event | None) -> None:
        """Waits until so many bytes may move. Raises TransferStopped."""
        if self._rate is None:
            return
        with self._rate_lock:
            seconds = self._rate.acquire(count_bytes, time.monotonic())
        if seconds > 0:
            (stop.wait if stop is not None else time.sleep)(seconds)
            check_stop(stop)

    def _enter(self, stop: threading.Event | None, backoff: Backoff | None) -> int:
        with self._changed:
            began, successes = time.monotonic(), self._successes
            self._waiting += 1
            try:
                while (seconds := self._window.wait_seconds(self._running, time.monotonic())) != 0:
                    check_stop(stop)
                    self._changed.wait(_LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS))
            finally:
                self._waiting -= 1
            self._running += 1
            if backoff is not None and self._successes != successes:
                backoff.leave_out(time.monotonic() - began)
            return self._window.cuts

    def _leave(self, began_at_cut: int, permit: Permit) -> None:
        with self._changed:
            if permit.timed_out or permit.status in SLOW_DOWN_STATUSES:
                self._window.refused(began_at_cut, self._running, time.monotonic(), permit.retry_after_seconds)
            elif permit.ended and permit.status is not None and (200 <= permit.status < 300 or permit.status == 412):
                self._successes += 1
                self._window.succeeded(began_at_cut, self._waiting)
            self._running -= 1
            # The one that has ended makes room, and the limit may have grown.
            self._changed.notify(2)
