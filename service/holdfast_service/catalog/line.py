"""The line of descent: which checkpoints led to where the run is now (protocol rule 3). Pure.

Attempts form a tree by what they resumed from. `latest` follows one line through it and not the largest step: after
a rollback to 500, a poisoned 1000 must never outrank 550.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class AttemptNode:
    """`resumed_from` is the attempt and step of the checkpoint that the ranks loaded; None for a fresh start.

    `cut` is True from the attempt's first commit or explicit rollback on.
    """

    number: int
    resumed_from: tuple[int, int] | None
    cut: bool


@dataclass(frozen=True)
class Segment:
    """The checkpoints of one attempt up to and with `max_step`; None: all of them."""

    attempt: int
    max_step: int | None


class Line:
    """Segments from the newest to the oldest; at most one per attempt."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = tuple(segments)
        self._max_step = {segment.attempt: segment.max_step for segment in self.segments}

    def __contains__(self, point: tuple[int, int]) -> bool:
        """Whether the checkpoint (attempt, step) lies on the line."""
        attempt, step = point
        if attempt not in self._max_step:
            return False
        limit = self._max_step[attempt]
        return limit is None or step <= limit


def line_of_descent(attempts: Iterable[AttemptNode]) -> Line:
    """The line of the newest attempt that has cut. One that has not leaves the line as the older ones made it."""
    by_number = {attempt.number: attempt for attempt in attempts}
    newest = max((attempt.number for attempt in by_number.values() if attempt.cut), default=None)
    segments: list[Segment] = []
    step: int | None = None
    while newest is not None and newest in by_number:
        segments.append(Segment(newest, step))
        parent = by_number[newest].resumed_from
        # Parents are older attempts; anything else would be a loop and ends the line.
        if parent is None or parent[0] >= newest:
            break
        newest, step = parent
    return Line(segments)
