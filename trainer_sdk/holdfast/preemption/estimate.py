"""Which state can still be finished before the deadline: the newest, the one in flight, or both. Pure.

Estimates come from this job's own last saves, from staged to committed (`save/job.py`, SaveRates). The slowest rank
counts, because a checkpoint is complete only with its last shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_A_STEP_SECONDS = 1.0
_SAFETY = 1.2
"""A margin: no save is as quick as the last one, and a save that is late by a second is lost."""


@dataclass(frozen=True)
class Numbers:
    """One rank's numbers for the choice. Seconds; None is unknown."""

    left: float
    """Until the last moment at which a save may end; infinite without a deadline."""
    is_saved: bool
    """This very step is committed or in flight."""
    in_flight: bool
    in_flight_seconds: float | None
    """Until the save in flight is committed."""
    new_seconds: float | None
    """To stage the present state, and until it is committed."""


class Choice(StrEnum):
    NEW = "the state of this step is saved"
    BOTH = "the save in flight is finished, then the state of this step is saved"
    SUPERSEDE = "the save in flight is given up for the state of this step, which can still be finished"
    IN_FLIGHT = "the save in flight is finished; the state of this step could not be"
    STAGED = "the state staged before is saved; no step ended in time"
    SAVED = "the state of this step is saved already"


@dataclass(frozen=True)
class Decision:
    choice: Choice
    left: float
    in_flight: bool
    in_flight_seconds: float | None
    new_seconds: float | None

    def __str__(self) -> str:
        in_flight = f"save in flight {_seconds(self.in_flight_seconds)}, " if self.in_flight else ""
        return (
            f"{self.choice} (left {_seconds(self.left)}; estimated: {in_flight}new save {_seconds(self.new_seconds)})"
        )


def decide(ranks: Sequence[Numbers], *, has_waited: bool = False) -> Decision:
    """The newest state that can be finished in time. The save in flight is given up only if the new save is estimated
    to fit and both together are not. `has_waited`: the ranks waited for both, but the save in flight is not over: its
    estimate was wrong."""
    left = min(numbers.left for numbers in ranks)
    in_flight = any(numbers.in_flight for numbers in ranks)
    in_flight_seconds = _slowest([numbers.in_flight_seconds for numbers in ranks if numbers.in_flight])
    new_seconds = _slowest([numbers.new_seconds for numbers in ranks])

    def decided(choice: Choice) -> Decision:
        return Decision(choice, left, in_flight, in_flight_seconds, new_seconds)

    if all(numbers.is_saved for numbers in ranks):
        return decided(Choice.SAVED)
    if not in_flight:
        # Even if it is not expected to fit, because there is no better use of the time.
        return decided(Choice.NEW)
    if not has_waited:
        if new_seconds is None or in_flight_seconds is None:
            return decided(Choice.BOTH)
        if (in_flight_seconds + new_seconds) * _SAFETY <= left:
            return decided(Choice.BOTH)
    if new_seconds is None:
        return decided(Choice.IN_FLIGHT)
    return decided(Choice.SUPERSEDE if new_seconds * _SAFETY <= left else Choice.IN_FLIGHT)


def may_wait(left: float, seconds: float | None) -> float:
    """How long a save of so many seconds may still be deferred; half of the time if its duration is unknown."""
    return left / 2 if seconds is None else max(0.0, left - seconds * _SAFETY) * 0.95


def may_wait_for_a_step(left: float, seconds: float | None) -> float:
    """How long a standby snapshot waits for a step to end. Also if it hardly fits: by estimates a newer state fits no
    worse, and most steps end within a second."""
    return max(may_wait(left, seconds), min(_A_STEP_SECONDS, left / 4))


def _slowest(seconds: Sequence[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return max(known) if len(known) == len(seconds) and known else None


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    return "without end" if math.isinf(seconds) else f"{seconds:.1f} s"
