"""A script's policies of when to save: `Every(steps=500) | Best("val_loss")`. Pure; schedule.py acts on them.

Any number of them, joined by `|`, in any nesting: a step is saved if one of them wants it saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.errors import ConfigurationError
from holdfast_protocol.runs import SelectorError, parse_point


class Policy:
    """When to save. `a | b` saves whenever either of them does."""

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies that this one consists of."""
        return (self,)

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return AnyOf((*self.parts, *other.parts))


@dataclass(frozen=True)
class AnyOf(Policy):
    """Made by `|`."""

    policies: tuple[Policy, ...]

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.policies


def ends_a_round(steps: int, step: int, last: int | None) -> bool:
    """Whether `step` is the last of a round of so many steps, or the first one behind it because the numbers have
    jumped over it. A loop that counts by twos from 2 on has no odd step, so 99 would never come. `last`: the step
    before; None if there was none."""
    return (step + 1) % steps == 0 or (last is not None and (step + 1) // steps > (last + 1) // steps)


@dataclass(frozen=True)
class Every(Policy):
    """`Every(steps=500)` or `Every(minutes=10)`: exactly one of the two. Raises ConfigurationError otherwise.

    Minutes are counted from the end of the last save of any kind.
    """

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
        """The interval in seconds; None if steps are counted."""
        return None if self.minutes is None else self.minutes * 60

    def due_after(self, step: int, last: int | None = None) -> bool:
        """Whether a save is due after `step`. Steps count from 0: Every(steps=100) saves after 99, 199, …, so that the
        last step of a round number of steps is saved. If the numbers jump over one of these, it saves after the first
        step behind it. `last`: the step before. Always false if minutes are counted."""
        return self.steps is not None and ends_a_round(self.steps, step, last)


@dataclass(frozen=True)
class Auto(Policy):
    """As often as loses the least: by the cost of saves and the frequency of interruptions, which the service measures;
    `holdfast runs advise project/run` explains its number. The default of a Checkpointer."""


@dataclass(frozen=True)
class Best(Policy):
    """The step whose metric is better than that of every step saved before, in this attempt and the earlier ones.

    Decided by rank 0's value, at the steps whose `metrics` have it. Every rank must pass the name at the same steps,
    with any value, or all raise RanksDisagree. NaN and infinity are never the best. `restore(at="best:val_loss")` finds
    the checkpoint.
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f'Best(…, mode={self.mode!r}) must be "min" or "max".')
        refusal = f"Best({self.metric!r}) must name a metric: text of 1 to 100 letters without : @ and #."
        if not isinstance(self.metric, str):
            raise ConfigurationError(refusal)
        try:
            parse_point(self.selector)
        except SelectorError:
            raise ConfigurationError(refusal) from None

    @property
    def selector(self) -> str:
        """The selector by which the service finds the best checkpoint."""
        return f"best:{self.metric}:{self.mode}"


@dataclass(frozen=True)
class OnPreemption(Policy):
    """When the job is told to leave. Every policy saves then; this one alone saves at no other time."""


def policy_of(save: Any) -> Policy:
    """The argument of `Checkpointer(save=…)`; without it Auto. Raises ConfigurationError."""
    if save is None:
        return Auto()
    if not isinstance(save, Policy):
        raise ConfigurationError(
            f"save={save!r:.80} does not say when to save. Write Every(steps=500), Every(minutes=10), Auto(), "
            'Best("val_loss") or OnPreemption(), or several joined by |.'
        )
    return save
