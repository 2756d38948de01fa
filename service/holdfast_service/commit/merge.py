"""What the ranks said, put together at the commit. Pure (protocol rule 7)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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


def missing_components(declared: Collection[str], has: Collection[str], dropped: Collection[str]) -> list[str]:
    """What the run's first checkpoint has and this one has not, without what was left out on purpose."""
    return sorted(set(declared) - set(has) - set(dropped))


def diverged_reason(
    ranks_not_finite: Sequence[int],
    metrics: Mapping[str, Mapping[str, Any]],
    verdicts: Mapping[int, Mapping[str, Any]],
) -> str | None:
    """Why nobody should resume from it; None if it is healthy. `verdicts`: a HealthVerdict for each rank that gave
    one. Where rank 0 gave one, the trainer's rule has looked at the metrics; else none may be other than finite."""
    told = {rank: str(said["reason"]) for rank, said in verdicts.items() if not said["healthy"]}
    silent = [rank for rank in ranks_not_finite if not told.get(rank)]
    reasons = [f"NaN or infinity in the state of {_ranks(silent)}"] if silent else []
    shown = list(dict.fromkeys(told.values()))[:_SHOWN]
    for reason in shown:
        ranks = [rank for rank, same in told.items() if same == reason]
        where = "" if ranks == [0] else f", on {_ranks(ranks)}"
        reasons.append((reason or "the trainer's rule says so") + where)
    if more := sum(reason not in shown for reason in told.values()):
        reasons.append(f"and {more} more rank{'s' if more > 1 else ''}")
    return "; ".join(reasons + ([] if 0 in verdicts else _not_finite(metrics))) or None


def _not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = sorted(name for name, metric in metrics.items() if metric.get("nonfinite") is not None)
    listed = ", ".join(f"{name} is {metrics[name]['nonfinite']}" for name in names[:_SHOWN])
    return [f"the metric {listed}" + (" and more" if len(names) > _SHOWN else "")] if names else []


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
