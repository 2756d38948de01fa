"""What the ranks said, put together at the commit. Pure (protocol rule 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHOWN = 5


def merge_components(shards: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Name -> kind and the bytes of all ranks together. `shards` in rank order: the first rank's kind counts."""
    merged: dict[str, dict[str, Any]] = {}
    for components in shards:
        for name, component in components.items():
            known = merged.setdefault(name, {"kind": component["kind"], "logical_bytes": 0})
            known["logical_bytes"] += component["logical_bytes"]
    return dict(sorted(merged.items()))


def diverged_reason(ranks_not_finite: Sequence[int], metrics: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why nobody should resume from it; None if everything is finite."""
    reasons = []
    if ranks_not_finite:
        reasons.append(f"NaN or infinity in the state of {_ranks(ranks_not_finite)}")
    names = sorted(name for name, metric in metrics.items() if metric.get("nonfinite") is not None)
    if names:
        listed = ", ".join(f"{name} is {metrics[name]['nonfinite']}" for name in names[:_SHOWN])
        reasons.append(f"the metric {listed}" + (" and more" if len(names) > _SHOWN else ""))
    return "; ".join(reasons) or None


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
