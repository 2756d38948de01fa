"""What a save interval would have cost: history replayed with it. Pure; `save_interval` asks for the best one.

A save is begun each `interval` of work, blocks training for C and is durable L later. An attempt that is interrupted
after an uptime u keeps the work of the saves that were durable by then, floor((u - L) / (interval + C)) of them, and
loses all else. For exponential uptimes the expected sum over k of P(u > k(interval + C) + L) is that of Daly's exact
model, and its best interval is Daly's; but it asks for no distribution, so bursts count as what they were: where
failures come one upon another, most of them hit an attempt that had little to lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SPREAD = 0.4
"""An uptime that was seen stands for all between 0.6 and 1.4 times it: that a save was just done when it ended is luck,
and would be learned as if it were not."""
EXPONENTIAL_UPTIMES = 10
"""So many uptimes are taken as seen with the mean at hand, exponential: the distribution while little was seen."""
_TRIES = 25
"""Intervals that are compared, evenly by their ratio; then as many again around the best of them."""


@dataclass(frozen=True)
class Uptime:
    """One attempt's time of training. Not `interrupted`: it still runs, or it ended without losing anything."""

    seconds: float
    interrupted: bool


@dataclass(frozen=True)
class SaveCost:
    blocked_seconds: float
    """Training stands still: C."""
    durable_seconds: float
    """From staged to committed; what comes after the staged step is lost, and so is this save until then: L."""


def lost_share(interval: float, uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost) -> float:
    """Of the uptime, what goes into saves and into work that is done again; 0 to 1. `mean_seconds`: between two
    interruptions, by which the rest of an uptime that was not interrupted is guessed."""
    total = EXPONENTIAL_UPTIMES * mean_seconds
    total += sum(each.seconds + (0.0 if each.interrupted else mean_seconds) for each in uptimes)
    return 1.0 - _kept_seconds(interval, uptimes, mean_seconds, cost) / total


def best_interval(
    uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost, *, shortest: float, longest: float
) -> float:
    """The interval in seconds, between the two bounds, that keeps the most work."""
    low, high = shortest, longest
    best = low
    for _ in range(2):
        ratio = (high / low) ** (1 / (_TRIES - 1))
        intervals = [low * ratio**number for number in range(_TRIES)]
        best = max(intervals, key=lambda interval: _kept_seconds(interval, uptimes, mean_seconds, cost))
        low, high = max(shortest, best / ratio), min(longest, best * ratio)
    return best


def _kept_seconds(interval: float, uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost) -> float:
    period, durable = interval + cost.blocked_seconds, cost.durable_seconds
    again = 1.0 / -math.expm1(-period / mean_seconds)
    saves = EXPONENTIAL_UPTIMES * again * math.exp(-(period + durable) / mean_seconds)
    for uptime in uptimes:
        if uptime.interrupted:
            saves += _saves_around(uptime.seconds, period, durable)
        else:
            past = max(0, math.floor((uptime.seconds - durable) / period))
            next_in = (past + 1) * period + durable - uptime.seconds
            saves += past + again * math.exp(-next_in / mean_seconds)
    return interval * saves


def _saves_around(seconds: float, period: float, durable: float) -> float:
    """The mean of floor((u - durable) / period) for u evenly between the bounds of the spread."""
    if seconds <= 0:
        return 0.0
    low, high = seconds * (1 - SPREAD) - durable, seconds * (1 + SPREAD) - durable
    return (_area(high, period) - _area(low, period)) / (high - low)


def _area(length: float, period: float) -> float:
    """The integral of floor(x / period) from 0 to length."""
    if length <= 0:
        return 0.0
    whole = math.floor(length / period)
    return period * whole * (whole - 1) / 2 + whole * (length - whole * period)
