"""What the demo promises, checked on the journals: pure, no processes and no service."""

from __future__ import annotations

import math
from collections.abc import Sequence

from journal import LaunchRecord, Step


class CheckFailedError(Exception):
    """A promise was not kept. The message says which, and shows the first place."""


def same_steps(reference: Sequence[LaunchRecord], interrupted: Sequence[LaunchRecord], *, steps: int) -> int:
    """Every step of every launch equals the reference's, loss and state, and no step is missing.

    Steps that were trained twice because of a kill must be equal both times. Returns how many were compared.
    """
    expected = {step.step: step for launch in reference for step in launch.steps}
    if sorted(expected) != list(range(steps)):
        raise CheckFailedError(f"the uninterrupted run trained {len(expected)} of {steps} steps")
    compared: set[int] = set()
    total = 0
    for number, launch in enumerate(interrupted, start=1):
        for step in launch.steps:
            _check_equal(expected[step.step], step, launch=number)
            compared.add(step.step)
            total += 1
    if missing := sorted(set(range(steps)) - compared):
        raise CheckFailedError(f"the interrupted run never trained step {missing[0]}")
    return total


def resumed_where_saved(launch: LaunchRecord, *, saved_step: int | None) -> None:
    """The launch went on one step after the newest committed checkpoint, or at 0 if there was none."""
    expected = 0 if saved_step is None else saved_step + 1
    if launch.start != expected:
        raise CheckFailedError(
            f"the newest checkpoint was of step {saved_step}, but training went on at {launch.start}"
        )


def same_state(saved: Step, resumed: LaunchRecord) -> None:
    """What was restored is what was saved, tensor by tensor, whatever the number of ranks."""
    if saved.state != resumed.state:
        raise CheckFailedError(
            f"the state restored on {resumed.world_size} rank(s) has the digest {resumed.state[:12]} and the one "
            f"after step {saved.step} had {str(saved.state)[:12]}"
        )


def went_on(launch: LaunchRecord, *, steps: int) -> None:
    """The launch trained all its steps and every loss is a number."""
    trained = [step.step for step in launch.steps]
    if trained != list(range(launch.start, steps)) or not trained:
        raise CheckFailedError(f"training should go on from {launch.start} to {steps - 1} and did the steps {trained}")
    for step in launch.steps:
        if not math.isfinite(float.fromhex(step.loss)):
            raise CheckFailedError(f"the loss of step {step.step} is {step.loss}")


def _check_equal(expected: Step, found: Step, *, launch: int) -> None:
    if expected.loss != found.loss:
        raise CheckFailedError(f"launch {launch}, step {found.step}: the loss is {found.loss} and was {expected.loss}")
    if expected.state != found.state:
        raise CheckFailedError(
            f"launch {launch}, step {found.step}: parameters and optimizer differ from the uninterrupted run"
        )
