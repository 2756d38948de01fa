"""Whether a policy asks for a copy of a checkpoint. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_protocol.copies import CopyPolicy
from holdfast_protocol.retention import KeepBest


@dataclass(frozen=True)
class Facts:
    """What a policy can ask about. `metrics` as the catalog keeps them: name -> {"value": …, "nonfinite": …}."""

    checkpoint_id: str
    step: int
    kind: str
    labels: tuple[str, ...]
    metrics: dict[str, Any]


def wants(policy: CopyPolicy, facts: Facts, best: frozenset[str]) -> bool:
    """`best`: the ids of the checkpoints that are among the best now."""
    return (
        policy.wants_everything
        or not set(policy.labels).isdisjoint(facts.labels)
        or facts.kind in policy.kinds
        or (policy.every_steps is not None and facts.step % policy.every_steps == 0)
        or facts.checkpoint_id in best
    )


def best_of(rule: KeepBest, run: Iterable[Facts]) -> frozenset[str]:
    """The ids of the run's `n` best finite values; of equal ones the newest step."""
    sign = 1.0 if rule.mode == "min" else -1.0
    ranked = []
    for facts in run:
        value = (facts.metrics.get(rule.metric) or {}).get("value")
        if isinstance(value, int | float) and math.isfinite(value):
            ranked.append((sign * value, -facts.step, facts.checkpoint_id))
    return frozenset(checkpoint_id for _, _, checkpoint_id in sorted(ranked)[: rule.n])
