"""The adviser over a simulated year of failures: it knows only what it has seen, and loses hardly more than the best
fixed interval, which a search over the whole year finds afterwards.

Lost: training stands still for saves, and work is done again. Restarts cost the same at every interval, and would only
make the two look alike; they are left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from holdfast_protocol.runs import AdviceBound, AdviceSource
from holdfast_service.insights.save_interval import (
    STORE_TIMES,
    Bounds,
    Measured,
    Pool,
    SaveCost,
    Uptime,
    best_interval,
    lost_share,
    recommend,
)

YEAR = 365 * 86400.0
HOUR = 3600.0
BOUNDS = Bounds(default_seconds=600.0, shortest_seconds=60.0, longest_seconds=4 * HOUR)
NEWEST = 300
"""As many attempts as the catalog looks at."""
LOOKS_AGAIN_AT = (24 * HOUR, 96 * HOUR, math.inf)
"""Into one attempt. Really it does so each minute."""

Draw = Callable[[float, random.Random], "Uptimes"]
Uptimes = list[float]


def exponential(mean: float, draw: random.Random) -> Uptimes:
    return _year(lambda: draw.expovariate(1 / mean))


def weibull(mean: float, draw: random.Random) -> Uptimes:
    """Of shape 0.6: most failures come soon after another one, and then long nothing."""
    scale = mean / math.gamma(1 + 1 / 0.6)
    return _year(lambda: draw.weibullvariate(scale, 0.6))


def storms(mean: float, draw: random.Random) -> Uptimes:
    """Markov-modulated: for a tenth of the time something is wrong, and failures come 32 times as fast."""
    rates, stays = (1 / (4 * mean), 8 / mean), (6 * mean, 0.6 * mean)
    stormy = False

    def next_uptime() -> float:
        nonlocal stormy
        uptime = 0.0
        while (fails_in := draw.expovariate(rates[stormy])) >= (changes_in := draw.expovariate(1 / stays[stormy])):
            uptime, stormy = uptime + changes_in, not stormy
        return uptime + fails_in

    return _year(next_uptime)


def _year(next_uptime: Callable[[], float]) -> Uptimes:
    uptimes, total = [], 0.0
    while total < YEAR:
        uptimes.append(min(next_uptime(), YEAR - total))
        total += uptimes[-1]
    return uptimes


def lost_at(interval: float, uptimes: np.ndarray, cost: SaveCost) -> float:
    saves = np.floor(np.maximum(0.0, uptimes - cost.durable_seconds) / (interval + cost.blocked_seconds))
    return float((uptimes - interval * saves).sum())


def lost_at_best(years: Sequence[Uptimes], cost: SaveCost) -> float:
    """Of all intervals that the bounds allow, one for all the years."""
    low = max(BOUNDS.shortest_seconds, STORE_TIMES * cost.durable_seconds)
    intervals = np.geomspace(low, max(low, BOUNDS.longest_seconds), 400)
    arrays = [np.array(year) for year in years]
    return min(sum(lost_at(float(interval), year, cost) for year in arrays) for interval in intervals)


def lost_by_advice(uptimes: Uptimes, cost: SaveCost) -> float:
    """Online: before each uptime, and at some moments in it, the adviser is asked with all that has been until then."""
    lost, interval, next_look = 0.0, BOUNDS.default_seconds, 1
    for number, uptime in enumerate(uptimes):
        if number >= next_look:
            interval, next_look = advised(uptimes[:number], 0.0, cost), number + 1 + number // 20
        kept, at = 0.0, 0.0
        # The very first save is made after the default interval; then it is measured.
        looks = LOOKS_AGAIN_AT if number else (interval + cost.blocked_seconds, *LOOKS_AGAIN_AT)
        for look in looks:
            end = min(uptime, look)
            period = interval + cost.blocked_seconds
            done = math.floor(max(0.0, end - at - (cost.durable_seconds if end == uptime else 0.0)) / period)
            kept, at = kept + done * interval, at + done * period
            if end == uptime:
                break
            interval = advised(uptimes[:number], end, cost)
        lost += uptime - kept
    return lost


def advised(seen: Uptimes, running: float, cost: SaveCost) -> float:
    uptimes = [Uptime(running, interrupted=False), *(Uptime(each, interrupted=True) for each in reversed(seen))]
    return recommend(measured(uptimes[:NEWEST], cost), BOUNDS).interval_seconds


def measured(uptimes: Sequence[Uptime], cost: SaveCost | None, source: AdviceSource = AdviceSource.RUN) -> Measured:
    return Measured(uptimes, Pool(), Pool(), cost, source, saves=0 if cost is None else 10)


OFTEN = [
    pytest.param(kind, hours, SaveCost(blocked, durable), id=f"{kind.__name__}-{hours}h-{blocked}s-{durable}s")
    for kind in (exponential, weibull, storms)
    for hours, blocked, durable in ((3, 2.0, 20.0), (3, 600.0, 300.0), (12, 30.0, 120.0))
]


@pytest.mark.parametrize(("kind", "hours", "cost"), OFTEN)
def test_over_a_year_the_advice_loses_at_most_a_twentieth_more_than_the_best_fixed_interval(
    kind: Draw, hours: float, cost: SaveCost
) -> None:
    year = kind(hours * HOUR, random.Random(f"{kind.__name__} {hours}"))
    assert lost_by_advice(year, cost) <= 1.05 * lost_at_best([year], cost)


@pytest.mark.parametrize("kind", [exponential, weibull, storms])
def test_with_a_hundred_failures_a_year_it_holds_for_ten_such_years_together(kind: Draw) -> None:
    """The best interval of one such year is the one that happened to save just before failures: nobody can know it."""
    cost = SaveCost(30.0, 120.0)
    years = [kind(72 * HOUR, random.Random(f"{kind.__name__} {number}")) for number in range(10)]
    assert sum(lost_by_advice(year, cost) for year in years) <= 1.05 * lost_at_best(years, cost)


@pytest.mark.parametrize("blocked", [1.0, 60.0, 3600.0])
def test_without_history_the_interval_is_that_of_dalys_exact_model(blocked: float) -> None:
    mean = 6 * HOUR
    best = best_interval([], mean, SaveCost(blocked, 30.0), shortest=1.0, longest=10 * mean)
    share = best / mean
    # Where nothing more is to be gained: (1 - x) e^(x + c) = 1, for x and c in units of the mean.
    assert (1 - share) * math.exp(share + blocked / mean) == pytest.approx(1.0, abs=0.01)
    if blocked == 1.0:
        assert best == pytest.approx(math.sqrt(2 * blocked * mean), rel=0.05)  # Young's first order


def test_failures_that_no_interval_helps_against_do_not_shorten_it() -> None:
    """A script that crashes at once, fifty times, while it is written."""
    cost = SaveCost(5.0, 20.0)
    long_ones = [Uptime(8 * HOUR, interrupted=True)] * 20
    crashes = [Uptime(15.0, interrupted=True)] * 50
    quiet, noisy = (recommend(measured(each, cost), BOUNDS) for each in (long_ones, crashes + long_ones))
    assert noisy.mean_seconds < quiet.mean_seconds / 3
    assert noisy.interval_seconds > quiet.interval_seconds / 2


def test_bounds_hold_whatever_was_measured() -> None:
    often, never = [Uptime(120.0, interrupted=True)] * 100, [Uptime(YEAR, interrupted=False)]

    def bounded(uptimes: list[Uptime], cost: SaveCost | None, source: AdviceSource = AdviceSource.RUN) -> object:
        found = recommend(measured(uptimes, cost, source), BOUNDS)
        return found.bound, round(found.interval_seconds)

    assert bounded(often, SaveCost(0.0, 0.0)) == (AdviceBound.SHORTEST, 60)
    assert bounded(never, SaveCost(100.0, 100.0)) == (AdviceBound.LONGEST, 4 * HOUR)
    assert bounded(often, SaveCost(0.1, 10 * HOUR)) == (AdviceBound.STORE, 15 * HOUR)
    assert bounded(never, SaveCost(100.0, 100.0), AdviceSource.FLEET) == (AdviceBound.UNMEASURED, 600)
    assert bounded(never, None) == (AdviceBound.UNMEASURED, 600)


def test_what_a_run_went_through_outweighs_the_others_the_more_it_has_seen() -> None:
    cost = SaveCost(5.0, 20.0)
    fleet = Pool(uptime_seconds=1000 * HOUR, interruptions=100)

    def mean_hours(count: int) -> tuple[float, AdviceSource]:
        uptimes = [Uptime(HOUR, interrupted=True)] * count
        found = recommend(Measured(uptimes, Pool(), fleet, cost, AdviceSource.RUN, 1), BOUNDS)
        return found.mean_seconds / HOUR, found.mean_source

    assert mean_hours(0) == (pytest.approx(10, rel=0.02), AdviceSource.FLEET)
    assert mean_hours(20) == (pytest.approx(20 / 11, rel=0.02), AdviceSource.RUN)


def test_half_and_twice_the_interval_lose_more() -> None:
    uptimes = [Uptime(5 * HOUR, interrupted=True), Uptime(HOUR, interrupted=True), Uptime(9 * HOUR, interrupted=False)]
    cost = SaveCost(10.0, 60.0)
    best = best_interval(uptimes, 5 * HOUR, cost, shortest=60.0, longest=4 * HOUR)
    half, here, twice = (lost_share(best * times, uptimes, 5 * HOUR, cost) for times in (0.5, 1.0, 2.0))
    assert 0 < here < half < 1
    assert here < twice < 1


@pytest.mark.parametrize("source", [AdviceSource.PROJECT, AdviceSource.FLEET])
def test_what_others_tell_of_their_saves_keeps_no_run_from_saving(source: AdviceSource) -> None:
    """One job may say that a save blocked it for longer than the world is old."""
    found = recommend(measured([], SaveCost(2.0**62, 1.0), source), BOUNDS)
    assert found.interval_seconds <= BOUNDS.longest_seconds
