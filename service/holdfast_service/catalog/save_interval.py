"""The recommended time between two saves, and why: pure, from what was measured (`save_history`).

1. the mean time between two interruptions: the run's own, drawn towards the project's, the fleet's and a guess
2. the interval that would have lost the least so far (`lost_time`)
3. the bounds: what the store bears, the shortest, the longest; and while the run itself has saved nothing, the default
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_protocol.advice import AdviceBound, AdviceSource
from holdfast_service.catalog.lost_time import SaveCost, Uptime, best_interval, lost_share

GUESSED_MEAN_SECONDS = 86400.0
"""Between two interruptions, while nothing has run anywhere: short for one host, long for a thousand. A mean that is
wrong by two costs 6% of what is lost anyway, and one day of running says more than it."""
GUESS_COUNTS = 1.0
"""The guess weighs as much as one interruption that was seen. What is known of the others weighs as two."""
OTHERS_COUNT = 2.0
STORE_TIMES = 1.5
"""The interval is never shorter than so many times a save's way to durable: a third of the time is left for saves that
take longer, and for what else uses the store. With less, saves meet each other and are put off."""


@dataclass(frozen=True)
class Pool:
    """What a group of attempts went through together."""

    uptime_seconds: float = 0.0
    interruptions: int = 0


@dataclass(frozen=True)
class Measured:
    """`cost` of saves of `cost_source`, `saves` of them; None where nothing was ever saved."""

    uptimes: Sequence[Uptime]
    project: Pool
    fleet: Pool
    cost: SaveCost | None
    cost_source: AdviceSource
    saves: int
    steps_per_second: float | None = None
    restart_seconds: float | None = None


@dataclass(frozen=True)
class Bounds:
    default_seconds: float
    shortest_seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Recommendation:
    interval_seconds: float
    unbounded_seconds: float | None
    """What would lose the least, were there no bounds; None while no save was measured."""
    bound: AdviceBound | None
    mean_seconds: float
    mean_source: AdviceSource
    lost_shares: tuple[float, float, float] | None
    """At half of the interval, at it, at twice it."""


def recommend(measured: Measured, bounds: Bounds) -> Recommendation:
    mean, source = _mean_seconds(measured)
    if measured.cost is None:
        return Recommendation(bounds.default_seconds, None, AdviceBound.UNMEASURED, mean, source, None)
    cost = measured.cost
    # Wide enough that a bound which binds is seen to bind.
    best = best_interval(measured.uptimes, mean, cost, shortest=1.0, longest=10 * bounds.longest_seconds)
    interval, bound = _bounded(best, cost, measured.cost_source, bounds)
    shares = tuple(lost_share(interval * times, measured.uptimes, mean, cost) for times in (0.5, 1.0, 2.0))
    return Recommendation(interval, best, bound, mean, source, (shares[0], shares[1], shares[2]))


def _bounded(best: float, cost: SaveCost, source: AdviceSource, bounds: Bounds) -> tuple[float, AdviceBound | None]:
    interval, bound = best, None
    if interval > bounds.longest_seconds:
        interval, bound = bounds.longest_seconds, AdviceBound.LONGEST
    if source is not AdviceSource.RUN and interval > bounds.default_seconds:
        # Others' saves may be dearer or cheaper than this run's; the first one of its own is measured soon.
        interval, bound = bounds.default_seconds, AdviceBound.UNMEASURED
    if interval < bounds.shortest_seconds:
        interval, bound = bounds.shortest_seconds, AdviceBound.SHORTEST
    # Last: whatever else is wanted, the store cannot give more.
    if interval < (borne := STORE_TIMES * (cost.blocked_seconds + cost.durable_seconds)):
        interval, bound = borne, AdviceBound.STORE
    return interval, bound


def _mean_seconds(measured: Measured) -> tuple[float, AdviceSource]:
    """Between two interruptions, and who has told the most about it."""
    run = Pool(sum(each.seconds for each in measured.uptimes), sum(1 for each in measured.uptimes if each.interrupted))
    fleet = _drawn(measured.fleet, GUESSED_MEAN_SECONDS, GUESS_COUNTS)
    project = _drawn(measured.project, fleet, OTHERS_COUNT)
    mean = _drawn(run, project, OTHERS_COUNT)
    told = (
        (run, OTHERS_COUNT, AdviceSource.RUN),
        (measured.project, OTHERS_COUNT, AdviceSource.PROJECT),
        (measured.fleet, GUESS_COUNTS, AdviceSource.FLEET),
    )
    for pool, weight, source in told:
        if pool.interruptions >= weight or pool.uptime_seconds >= weight * GUESSED_MEAN_SECONDS:
            return mean, source
    return mean, AdviceSource.DEFAULT


def _drawn(pool: Pool, towards: float, weight: float) -> float:
    """The pool's mean, drawn towards another as if that had been seen `weight` times."""
    return (pool.uptime_seconds + weight * towards) / (pool.interruptions + weight)
