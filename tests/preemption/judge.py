"""What must hold after a launch was told to leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointState
from tests.preemption.launch import Launched
from tests.preemption.plan import Plan


class Verdict(StrEnum):
    NEWEST = "the newest state is committed"
    STAGED = "the deadline was shorter than a save, and the last staged state is committed"
    NOTHING_NEW = "no step had been run: the newest state was committed before"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Judged:
    verdict: Verdict
    why: str = ""


def judge(plan: Plan, launched: Launched, before: CheckpointView | None, after: Sequence[CheckpointView]) -> Judged:
    """`before`: the newest committed checkpoint when the launch began; `after`: all checkpoints now."""
    last = [max((line["step"] for line in journal if "step" in line), default=None) for journal in launched.journals]
    told = [[line for line in journal if "preempted" in line] for journal in launched.journals]
    if errors := [line["failed"] for journal in launched.journals for line in journal if "failed" in line]:
        return Judged(Verdict.FAILED, f"a rank raised {errors[0]}")
    if -9 in launched.exit_codes and not plan.is_too_short:
        return Judged(Verdict.FAILED, f"still there at the deadline: exit codes {launched.exit_codes}")
    if all(told) and last[0] != last[1]:
        return Judged(Verdict.FAILED, f"the ranks left after different steps: {last}")
    committed = max((view.step for view in after if view.state == CheckpointState.COMMITTED), default=None)
    if all(step is None for step in last):
        same = committed == (before.step if before is not None else None)
        return Judged(Verdict.NOTHING_NEW if same else Verdict.FAILED, f"committed is {committed}, before {before}")
    newest = min(step for step in last if step is not None)
    if committed == newest:
        return Judged(Verdict.NEWEST)
    found = f"the newest step is {newest}, committed is {committed}; exit codes {launched.exit_codes}"
    if not plan.is_too_short:
        return Judged(Verdict.FAILED, found)
    staged = _last_staged(launched, before)
    # What had just begun to go up could not be finished either: a save takes longer than the whole deadline.
    return Judged(Verdict.STAGED if committed in staged else Verdict.FAILED, f"{found}, staged was {staged}")


def _last_staged(launched: Launched, before: CheckpointView | None) -> list[int | None]:
    """The saves that were in flight when the job was told, and the one before them."""
    steps: list[int | None] = [before.step if before is not None else None]
    for line in launched.journals[0]:
        for step in line.get("in_flight", []):
            if step not in steps:
                steps.append(step)
    return steps[-2:]
