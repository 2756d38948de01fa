"""How fast this process may move chunks: turns, as the store bears them, and bytes per second, as the user sets them.

One per TransferPool, shared by all its uploads and downloads. What is decided stands in `window` and `byte_rate`; here
are the lock, the clock and the waiting. Costs nothing where there is no limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_client.backoff import Backoff, jittered_seconds
from holdfast_client.chunks.byte_rate import ByteRate
from holdfast_client.chunks.stopping import check_stop
from holdfast_client.chunks.window import TransferWindow

_LOOK_SECONDS = 0.1
"""A stop event cannot wake a waiter of a condition; so often it is looked at."""

SLOW_DOWN_STATUSES = frozenset({429, 503})


@dataclass
class Turn:
    """One transfer's try, and what the store has answered; without a status the connection broke before it did."""

    status: int | None = None
    retry_after_seconds: float = 0.0
    ended: bool = False
    """The transfer has read the answer to its end."""
    timed_out: bool = False
    """The connection stood, and no answer came: a store that has too much to do and does not say so."""


class Pace:
    def __init__(self, bytes_per_second: int | None = None) -> None:
        self._window = TransferWindow(jittered_seconds)
        self._rate = None if bytes_per_second is None else ByteRate(bytes_per_second, time.monotonic())
        self._rate_lock = threading.Lock()
        self._changed = threading.Condition()
        self._running = self._waiting = self._successes = 0

    def beside(self) -> Pace:
        """For another store: its own turns, under the same limit on bytes."""
        other = Pace()
        other._rate, other._rate_lock = self._rate, self._rate_lock
        return other

    @property
    def limit(self) -> int | None:
        """How many transfers may run at once now; None: the store has not asked for a limit."""
        return self._window.limit

    @contextmanager
    def turn(self, stop: threading.Event | None, backoff: Backoff | None) -> Iterator[Turn]:
        """Waits for a turn, then counts how it ended. `backoff` is not charged for a wait in which others got through.
        Raises TransferStopped."""
        began_at_cut = self._enter(stop, backoff)
        turn = Turn()
        try:
            yield turn
            turn.ended = True
        finally:
            self._leave(began_at_cut, turn)

    def slice_bytes(self, most: int) -> int:
        """How many bytes to move at once: `most`, or fewer where the rate is low."""
        return most if self._rate is None else min(most, self._rate.slice_bytes)

    def spend(self, count_bytes: int, stop: threading.Event | None) -> None:
        """Waits until so many bytes may move. Raises TransferStopped."""
        if self._rate is None:
            return
        with self._rate_lock:
            seconds = self._rate.spend(count_bytes, time.monotonic())
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

    def _leave(self, began_at_cut: int, turn: Turn) -> None:
        with self._changed:
            if turn.timed_out or turn.status in SLOW_DOWN_STATUSES:
                self._window.refused(began_at_cut, self._running, time.monotonic(), turn.retry_after_seconds)
            elif turn.ended and turn.status is not None and (200 <= turn.status < 300 or turn.status == 412):
                self._successes += 1
                self._window.succeeded(began_at_cut, self._waiting)
            self._running -= 1
            # The one that has ended makes room, and the limit may have grown.
            self._changed.notify(2)
