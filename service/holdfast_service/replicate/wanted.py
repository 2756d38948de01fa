"""Whether a policy asks for a copy of a checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_protocol.copies import CopyPolicy


@dataclass(frozen=True)
class Facts:
    """What a policy can ask about. `metrics` as the catalog keeps them: name -> {"value": …, "nonfinite": …}."""

    checkpoint_id: str
    step: int
    kind: str
    labels: tuple[str, ...]
    metrics: dict[str, Any]
    healthy: bool = True


def wants(policy: CopyPolicy, facts: Facts, best: frozenset[str]) -> bool:
    """`best`: the ids of the checkpoints that are among the best now."""
    return (
        policy.wants_everything
        or not set(policy.labels).isdisjoint(facts.labels)
        or facts.kind in policy.kinds
        or (policy.every_steps is not None and facts.step % policy.every_steps == 0)
        or facts.checkpoint_id in best
    )
