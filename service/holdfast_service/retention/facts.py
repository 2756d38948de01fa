"""What a decision about a checkpoint rests on. Pure; `read_facts` fills it from the catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from holdfast_protocol.states import CheckpointState, Health


@dataclass(frozen=True, slots=True)
class Fact:
    """One checkpoint that is committed or uploading.

    `at`: when it was committed; of one that uploads, when it was begun. `metrics` as the catalog keeps them. `version`
    is the row's: whoever acts on the fact later sees by it whether it still holds. `held`, `pin`, `read_until` and
    `resumed_by` are what is in force now. `copied_to`: the stores beside the primary that have all of it.
    `proven`: every byte was hashed by a store or the service; it is looked up for the newest healthy points, until two
    are found.
    """

    id: str
    step: int
    attempt: int
    at: datetime
    state: CheckpointState = CheckpointState.COMMITTED
    health: Health = Health.OK
    on_line: bool = True
    labels: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    logical_bytes: int = 0
    version: int = 1
    held: Sequence[str] = ()
    pin: str | None = None
    read_until: datetime | None = None
    resumed_by: Sequence[int] = ()
    copied_to: Sequence[int] = ()
    proven: bool = True

    @property
    def committed(self) -> bool:
        return self.state is CheckpointState.COMMITTED

    @property
    def healthy(self) -> bool:
        return self.committed and self.health is Health.OK


@dataclass(frozen=True, slots=True)
class RunFacts:
    """`running`: an attempt has not ended. `restore_point`: the id of what a launch would resume from now."""

    facts: Sequence[Fact]
    restore_point: str | None
    running: bool = False


def newest_first(facts: Sequence[Fact]) -> list[Fact]:
    """By the moment of the commit, as restic orders snapshots; of the same moment the larger step first."""
    return sorted(facts, key=lambda fact: (fact.at, fact.step, fact.attempt, fact.id), reverse=True)
