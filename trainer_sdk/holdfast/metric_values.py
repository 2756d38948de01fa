"""The numbers of `metrics`, as a script gives them. A tensor is read, and so waited for: only where it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast_protocol.checkpoints import MAX_METRICS, MetricValue
from holdfast_protocol.text import is_text

Metrics = Mapping[str, Any]
"""Names of at most 100 letters -> numbers, or tensors with one element."""


def metric_values(metrics: Metrics) -> dict[str, MetricValue]:
    """Raises TypeError, which names the metric."""
    if len(metrics) > MAX_METRICS:
        raise TypeError(f"there are {len(metrics)} metrics, and {MAX_METRICS} are the most; leave some out")
    values = {}
    for name, value in metrics.items():
        if not (isinstance(name, str) and 1 <= len(name) <= 100 and is_text(name, one_line=True)):
            raise TypeError(f"the metric name {name!r:.120} is not usable; give text of 1 to 100 letters in one line")
        values[name] = MetricValue.of(number_of(name, value))
    return values


def number_of(name: str, value: Any) -> float:
    """Raises TypeError, which names the metric."""
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metrics[{name!r}] is a {type(value).__name__}, not one number; give a float or a one-element tensor"
        ) from error
