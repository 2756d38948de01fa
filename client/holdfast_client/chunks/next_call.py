"""What waits for an uploader's next call to the service, and when that call is due: seldom, and so that nobody starves.

    hashed -> offer() -> [call] -> present, or a ticket -> sent -> report() -> [call] -> verified

A call costs the service much the same however large it is. Pure; `uploader` makes the calls, one at a time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from holdfast_protocol.chunks import MAX_BATCH

FIRST_OFFER_PART = 1 / 32
"""Of the bytes that may be held: so many are offered in the first call, so that sending begins at once. Each further
call offers as many as all before it together,"""
LARGEST_OFFER_PART = 1 / 8
"""but no more than these: what is hashed last is sent last, with nothing to overlap it;"""
OFFER_PART_WHEN_BUSY = 1 / 4
"""and these while every sending thread has something to do."""
REPORT_PART = 1 / 4
"""What was sent is reported with the next offer; or when it is so much,"""
REPORT_SECONDS = 1.0
"""or when the last answer is so old."""


class Call(NamedTuple):
    """The digests of a call."""

    offered: list[str]
    reported: list[str]


class NextCall:
    """`most_held_bytes`: how much may be hashed and not yet verified. Times are `time.monotonic()`'s."""

    def __init__(self, most_held_bytes: int, now: float) -> None:
        self._most = most_held_bytes
        self._answered_at = now
        self._to_offer: deque[tuple[str, int]] = deque()
        self._to_report: deque[tuple[str, int]] = deque()
        self._to_offer_bytes = self._to_report_bytes = self._offered_bytes = 0
        self.under_way = False

    def offer(self, digest: str, held_bytes: int) -> None:
        """The chunk is to be offered, for the first time or again."""
        self._to_offer.append((digest, held_bytes))
        self._to_offer_bytes += held_bytes

    def report(self, digest: str, held_bytes: int) -> None:
        """The chunk was sent."""
        self._to_report.append((digest, held_bytes))
        self._to_report_bytes += held_bytes

    def is_due(self, now: float, *, senders_idle: bool, all_hashed: bool, stuck: bool) -> bool:
        """`all_hashed`: nothing more will be offered for the first time. `stuck`: without a call nothing goes on."""
        if self.under_way or not self.waits:
            return False
        if stuck or (all_hashed and self._to_offer):
            return True
        if max(len(self._to_offer), len(self._to_report)) >= MAX_BATCH:
            return True
        if self._to_report and now - self._answered_at >= REPORT_SECONDS:
            return True
        return self._to_report_bytes >= self._most * REPORT_PART or self._to_offer_bytes >= self._batch(senders_idle)

    @property
    def waits(self) -> bool:
        """Whether there is something to tell the service."""
        return bool(self._to_offer or self._to_report)

    def begin(self) -> Call:
        """Takes what waits, as much as one call may carry."""
        self.under_way = True
        offered = [self._to_offer.popleft() for _ in range(min(MAX_BATCH, len(self._to_offer)))]
        reported = [self._to_report.popleft() for _ in range(min(MAX_BATCH, len(self._to_report)))]
        offered_bytes = sum(held_bytes for _, held_bytes in offered)
        self._to_offer_bytes -= offered_bytes
        self._offered_bytes += offered_bytes
        self._to_report_bytes -= sum(held_bytes for _, held_bytes in reported)
        return Call([digest for digest, _ in offered], [digest for digest, _ in reported])

    def end(self, now: float) -> None:
        """The service has answered."""
        self.under_way = False
        self._answered_at = now

    def _batch(self, senders_idle: bool) -> float:
        if not senders_idle:
            return self._most * OFFER_PART_WHEN_BUSY
        return min(max(self._most * FIRST_OFFER_PART, self._offered_bytes), self._most * LARGEST_OFFER_PART)
