"""Which checkpoints are the best by a metric: one order for restores, retention and copies. Pure (protocol rule 32)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar


class ByMetric(Protocol):
    """A rule or a selector. `mode`: `min`, the smallest is the best, or `max`."""

    @property
    def metric(self) -> str: ...
    @property
    def mode(self) -> str: ...


class Judged(Protocol):
    """`metrics` as the catalog keeps them: name -> {"value": …, "nonfinite": …}."""

    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def healthy(self) -> bool: ...


J = TypeVar("J", bound=Judged)


def finite_value(metrics: Mapping[str, Any], metric: str) -> float | None:
    """None: the metric is missing or not finite, so nobody can judge by it."""
    value = (metrics.get(metric) or {}).get("value")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def rank(metrics: Mapping[str, Any], by: ByMetric) -> float | None:
    """The smaller, the better; None as `finite_value`."""
    value = finite_value(metrics, by.metric)
    return None if value is None else value if by.mode == "min" else -value


def best_of(newest_first: Iterable[J], by: ByMetric, most: int) -> list[J]:
    """The best first; of equal ones the newest. What is not healthy is no best: it may have diverged to a fine loss."""
    ranked = [(rank(each.metrics, by), each) for each in newest_first if each.healthy]
    judged = [(value, each) for value, each in ranked if value is not None]
    return [each for _, each in sorted(judged, key=lambda pair: pair[0])[:most]]
