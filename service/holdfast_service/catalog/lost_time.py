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
_TRIES = 20
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
    return 1.0 - _Replay(uptimes, mean_seconds, cost).kept_seconds(interval) / total


def best_interval(
    uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost, *, shortest: float, longest: float
) -> float:
    """The interval in seconds, between the two bounds, that keeps the most work."""
    replay = _Replay(uptimes, mean_seconds, cost)
    low, high = shortest, longest
    best = low
    for _ in range(2):
        ratio = (high / low) ** (1 / (_TRIES - 1))
        best = max((low * ratio**number for number in range(_TRIES)), key=replay.kept_seconds)
        low, high = max(shortest, best / ratio), min(longest, best * ratio)
    return best


class _Replay:
    def __init__(self, uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost) -> None:
        self._mean = mean_seconds
        self._blocked = cost.blocked_seconds
        durable = cost.durable_seconds
        # An attempt that has just begun stands for a whole uptime, of which nothing is known but the mean.
        self._running = [
            *((each.seconds - durable, 1.0) for each in uptimes if not each.interrupted),
            (-durable, EXPONENTIAL_UPTIMES),
        ]
        self._ended = [
            (max(0.0, low), high, 1.0 / (high - low))
            for each in uptimes
            if each.interrupted
            and (high := each.seconds * (1 + SPREAD) - durable) > 0
            and (low := each.seconds * (1 - SPREAD) - durable) < high
        ]

    def kept_seconds(self, interval: float) -> float:
        period = interval + self._blocked
        saves = 0.0
        for low, high, weight in self._ended:
            # The mean of floor(u / period) between them: the integral of floor(x / p) to x is n (x - p (n + 1) / 2).
            more, less = high // period, low // period
            saves += weight * (more * (high - period * (more + 1) / 2) - less * (low - period * (less + 1) / 2))
        again = 1.0 / -math.expm1(-period / self._mean)
        for gone, weight in self._running:
            past = max(0.0, gone // period)
            next_in = (past + 1) * period - gone
            saves += weight * (past + again * math.exp(-next_in / self._mean))
        return interval * saves
