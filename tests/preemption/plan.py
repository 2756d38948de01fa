"""What one launch is like, drawn from its seed: the same seed gives the same launch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

WORLD_SIZE = 2
SHARD_BYTES = 1_800_000
"""About what one of two ranks stores of the job's state."""
PARAMETERS = 300_000


class Kind(StrEnum):
    FAST = "a store that is fast"
    SLOW = "a store that is slow"
    LONG = "steps that end too late, stage_every=1"
    SHORT = "a deadline that is shorter than a save"


@dataclass(frozen=True)
class Plan:
    seed: int
    kind: Kind
    told: tuple[int, ...]
    """The ranks that get the signal."""
    after_seconds: float
    """From `begins_with` on."""
    grace_seconds: float
    """Until SIGKILL, and what the job is told of that."""
    save_every: int
    stage_every: int | None
    bytes_per_second: int | None
    """Of each rank, to the store."""
    begins_with: str
    """What both ranks have written down when the time to the signal begins."""

    @property
    def save_seconds(self) -> float:
        """What the upload of a save takes at least."""
        return SHARD_BYTES / self.bytes_per_second if self.bytes_per_second else 0.0

    @property
    def is_too_short(self) -> bool:
        return self.grace_seconds < self.save_seconds

    def step_seconds(self, step: int) -> float:
        """The same on both ranks. Now and then one takes long."""
        draw = random.Random(f"{self.seed} {step}")
        if self.kind is Kind.LONG and draw.random() < 0.1:
            return 2 * self.grace_seconds
        return 1.0 if draw.random() < 0.02 else draw.uniform(0.005, 0.08)

    def evaluation_seconds(self, step: int) -> float:
        return random.Random(f"{self.seed} {step} evaluation").uniform(0.2, 1.0) if step % 20 == 19 else 0.0


def plan_of(seed: int) -> Plan:
    draw = random.Random(seed)
    [kind] = draw.choices(list(Kind), weights=[6, 2, 1, 1])
    save_seconds = 0.0 if kind in (Kind.FAST, Kind.LONG) else draw.uniform(1.5, 3.0)
    # On a busy machine a save takes half as long again as its bytes do; the last three seconds are the script's own.
    slow = 4 + 2 * 1.5 * save_seconds
    grace = {Kind.FAST: 12.0, Kind.LONG: 14.0, Kind.SLOW: slow, Kind.SHORT: 0.7 * save_seconds}[kind]
    return Plan(
        seed=seed,
        kind=kind,
        told=draw.choice([(0,), (1,), (0, 1)]),
        after_seconds=draw.uniform(0.0, 5.0 if save_seconds else 3.0),
        grace_seconds=grace,
        save_every=draw.randint(5, 30),
        stage_every=1 if kind is Kind.LONG else draw.choice([None, None, 4]),
        bytes_per_second=int(SHARD_BYTES / save_seconds) if save_seconds else None,
        # That they have a Checkpointer. Where the store is slow, that they have restored: this takes as long as a save.
        begins_with="start" if save_seconds else "ready",
    )
