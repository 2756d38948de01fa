"""How often to save: after so many steps, or so many minutes. Pure; the checkpointer asks it, `agreement` makes the
ranks agree on the clock's answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import ConfigurationError


@dataclass(frozen=True)
class Every:
    """`Every(steps=500)` or `Every(minutes=10)`: exactly one of the two. Raises ConfigurationError otherwise."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigurationError(
                "Every(…) takes either steps or minutes. Write Every(steps=500) or Every(minutes=10)."
            )
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise ConfigurationError(f"Every(steps={self.steps!r}) must be a whole number of steps, at least 1.")
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes > 0):
            raise ConfigurationError(f"Every(minutes={self.minutes!r}) must be a number above 0.")

    @property
    def seconds(self) -> float | None:
        """The interval in seconds; None where steps are counted."""
        return None if self.minutes is None else self.minutes * 60

    def due_after(self, step: int) -> bool:
        """Whether a save is due once `step` was run. Steps count from 0: Every(steps=100) saves after 99, 199, …,
        so that the last step of a round number of steps is saved. Always false where minutes are counted."""
        return self.steps is not None and (step + 1) % self.steps == 0
