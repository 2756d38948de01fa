"""A rule for `healthy=`: the loss has left its band. It uses only what any rule may."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from holdfast.errors import ConfigurationError
from holdfast.health.diverged import losses_are_finite

_TO_SIGMA = 1.4826
"""The median absolute deviation of normally distributed values, times this, is their standard deviation."""
_LEAST_SPREAD = 0.01
"""Part of the median: a loss that hardly moves must not count as a spike at its first movement."""


class LossSpike:
    """`Checkpointer("demo/gpt", healthy=LossSpike())`: diverged while the loss is too high, or if it is not finite.

    Too high: the median of the last `recent` losses is more than `deviations` robust standard deviations (from the
    median absolute deviation) above the median of the `window` ordinary ones before. Losses above that band do not
    widen it. If they stay there for a whole window they count as the new level (for example of a new mixture of data),
    and checkpoints are healthy again. Until `window / 4` losses are known there is no band.

    A step costs a few microseconds, and on a GPU one small copy there: values are read at saves only.
    """

    def __init__(self, metric: str = "loss", *, deviations: float = 6.0, window: int = 200, recent: int = 5) -> None:
        if deviations <= 0 or not 1 <= recent <= window / 4:
            raise ConfigurationError(
                f"LossSpike(deviations={deviations}, window={window}, recent={recent}) sees no spike. Give deviations "
                "above 0, and a window of at least four times recent, which is at least 1."
            )
        self._metric = metric
        self._deviations = deviations
        self._window = window
        self._recent = recent
        self._seen: deque[tuple[int, Any]] = deque(maxlen=window)
        """Not read yet."""
        self._ordinary: deque[tuple[int, float]] = deque(maxlen=window)
        self._above: list[tuple[int, float]] = []
        self._last: deque[tuple[int, float]] = deque(maxlen=recent)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        value = metrics.get(self._metric)
        if value is None:
            return
        if isinstance(value, torch.Tensor):
            # A copy, because its owner may write the next loss into it. Queued on a device, not waited for.
            value = value.detach().clone()
        if self._seen and step <= self._seen[-1][0]:
            self._forget_from(step)
        self._seen.append((step, value))

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool | str:
        if (finite := losses_are_finite(step, metrics)) is not True:
            return finite
        if not math.isfinite(metrics.get(self._metric, 0.0)):
            return f"{self._metric} is {metrics[self._metric]}"
        self._read()
        band = self._band()
        if band is None or not self._last:
            return True
        level = median(value if math.isfinite(value) else math.inf for _, value in self._last)
        if level <= band:
            return True
        return f"{self._metric} is {level:.6g} (median of {len(self._last)} steps), and was at most {band:.6g} before"

    def _read(self) -> None:
        pending, self._seen = self._seen, deque(maxlen=self._window)
        tensors = [value.reshape(()).float() for _, value in pending if isinstance(value, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else ())  # one wait for all
        for step, value in pending:
            self._take(step, next(read) if isinstance(value, torch.Tensor) else float(value))

    def _take(self, step: int, value: float) -> None:
        for values in (self._ordinary, self._last):
            if values and step <= values[-1][0]:
                self._forget_from(step)
        self._last.append((step, value))
        band = self._band()
        if math.isfinite(value) and (band is None or value <= band):
            self._ordinary.append((step, value))
            self._above.clear()
            return
        self._above.append((step, value))
        if len(self._above) >= self._window:
            self._ordinary = deque(((at, each) for at, each in self._above if math.isfinite(each)), self._window)
            self._above.clear()

    def _band(self) -> float | None:
        values = [value for _, value in self._ordinary]
        if len(values) < self._window / 4:
            return None
        middle = median(values)
        spread = max(_TO_SIGMA * median(abs(value - middle) for value in values), _LEAST_SPREAD * abs(middle))
        return middle + self._deviations * spread

    def _forget_from(self, step: int) -> None:
        """The job has gone back: losses from there on do not count."""
        self._seen = deque((pair for pair in self._seen if pair[0] < step), self._window)
        self._ordinary = deque((pair for pair in self._ordinary if pair[0] < step), self._window)
        self._last = deque((pair for pair in self._last if pair[0] < step), self._recent)
        self._above = [pair for pair in self._above if pair[0] < step]
