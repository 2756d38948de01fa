"""How fast this process may move chunks: transfers at once, as the store bears them, and the user's bytes per second.

One RateLimit per TransferPool, shared by all its uploads and downloads. TransferWindow and ByteRate decide, and are
pure; RateLimit has the lock, the clock and the waiting. Without a limit it costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_client.transport import Backoff, check_stop, jittered_seconds

BURST_SECONDS = 0.25
"""Unused bytes are kept this long: a pause must not be followed by a flood."""

SLICES_PER_SECOND = 64
"""A slice is at most this part of a second's bytes, so that none of many transfers is silent until the store hangs
up."""
SMALLEST_SLICE_BYTES = 4096


class ByteRate:
    def __init__(self, bytes_per_second: int, now: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = now
        self.slice_bytes = max(SMALLEST_SLICE_BYTES, bytes_per_second // SLICES_PER_SECOND)

    def acquire(self, count_bytes: int, now: float) -> float:
        """Seconds from `now` until the bytes may move; in the order of the calls."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + count_bytes / self._bytes_per_second
        return max(0.0, begin - now)


LONGEST_HOLD_SECONDS = 60.0
PROBE_STRETCHES = 8
"""Stretches of successes until the last refused number is reached again: a store's capacity seldom changes."""


class TransferWindow:
    """How many transfers may run at once. No limit until the store asks for one; never below one.

    A refusal that asks to slow down halves the number, a stretch of successes adds one (AIMD, as in TCP: users of one
    store reach fair shares without knowing each other)."""

    def __init__(self, jittered_seconds: Callable[[int], float]) -> None:
        """`jittered_seconds(n)`: a random pause after n refusals in a row."""
        self.limit: int | None = None
        self.cuts = 0
        """How often the limit was halved. A transfer keeps the count at which it began."""
        self._jittered_seconds = jittered_seconds
        self._hold_until = 0.0
        self._refused_at: int | None = None
        self._in_a_row = 0
        self._successes = 0

    def wait_seconds(self, running: int, now: float) -> float | None:
        """Seconds until one more may begin: 0 is now, None once a running one has ended."""
        if self.limit is not None and running >= self.limit:
            return None
        return max(0.0, self._hold_until - now)

    def refused(self, began_at_cut: int, running: int, now: float, retry_after_seconds: float) -> None:
        """The store asks to slow down. `running` includes the refused transfer.

        One cut per round trip: a transfer that began before the last cut tells nothing new.
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
        """One transfer has arrived. `waiting`: transfers that wait for a permit; without any a higher limit serves
        none."""
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


_LOOK_SECONDS = 0.1
"""How often a waiter polls its stop event, which cannot wake a condition."""

SLOW_DOWN_STATUSES = frozenset({429, 503})


@dataclass
class Permit:
    """One transfer's try, and the store's answer; without a status the connection broke before it answered."""

    status: int | None = None
    retry_after_seconds: float = 0.0
    ended: bool = False
    """The transfer has read the answer to its end."""
    timed_out: bool = False
    """The connection stood, but no answer came: the store is overloaded and does not say so."""


class RateLimit:
    def __init__(self, bytes_per_second: int | None = None) -> None:
        self._window = TransferWindow(jittered_seconds)
        self._rate = None if bytes_per_second is None else ByteRate(bytes_per_second, time.monotonic())
        self._rate_lock = threading.Lock()
        self._changed = threading.Condition()
        self._running = self._waiting = self._successes = 0

    def beside(self) -> RateLimit:
        """For another store: its own permits, under the same limit on bytes."""
        other = RateLimit()
        other._rate, other._rate_lock = self._rate, self._rate_lock
        return other

    @property
    def limit(self) -> int | None:
        """How many transfers may run at once now; None: the store has not asked for a limit."""
        return self._window.limit

    @contextmanager
    def permit(self, stop: threading.Event | None, backoff: Backoff | None) -> Iterator[Permit]:
        """Waits for a permit, then counts how it ended. `backoff` is not charged for a wait in which other transfers
        succeeded. Raises TransferStopped."""
        began_at_cut = self._enter(stop, backoff)
        permit = Permit()
        try:
            yield permit
            permit.ended = True
        finally:
            self._leave(began_at_cut, permit)

    def slice_bytes(self, most: int) -> int:
        """How many bytes to move at once: `most`, or fewer at a low rate."""
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
            # The ended transfer makes room, and the limit may have grown.
            self._changed.notify(2)
