"""The exit code of `holdfast run`, decided from what is known when the child has ended. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.run.outcome import Outcome
from holdfast_protocol.states import AttemptOutcome

_RESERVED = (ExitCode.PREEMPTED, ExitCode.UNKNOWN, ExitCode.FENCED)
_SIGNALLED = 128
"""What a shell adds to the number of the signal that ended a command."""


@dataclass(frozen=True)
class Ending:
    code: int
    what: str
    """One sentence for people."""


def ending_of(child: int, known: Outcome | None, *, asked_to_end: bool) -> Ending:
    """`child`: its exit status, or minus a signal's number. `known`: None where no attempt was opened.
    `asked_to_end`: a preemption's signal was sent on to it."""
    own = _SIGNALLED - child if child < 0 else child
    outcome = known.outcome if known is not None else None
    who = f"{known.run}, attempt {known.attempt}," if known is not None else "The job"
    if outcome is AttemptOutcome.FENCED:
        return Ending(ExitCode.FENCED, f"{who} has lost its run to another launch. Do not launch this one again.")
    if outcome is AttemptOutcome.PREEMPTED:
        return Ending(ExitCode.PREEMPTED, f"{who} was preempted. Launch it again.")
    if child == 0 and (known is None or outcome is AttemptOutcome.FINISHED):
        return Ending(ExitCode.OK, f"{who} has finished.")
    if asked_to_end:
        # Whatever it died of then, it died of having to go: of a peer that was gone first, or before its first step.
        return Ending(ExitCode.PREEMPTED, f"{who} was told to end before it had finished. Launch it again.")
    if known is None:
        return Ending(own, f"{who} ended with {_said(child)}, and had opened no attempt.")
    if outcome is None or outcome is AttemptOutcome.LOST:
        return Ending(ExitCode.UNKNOWN, f"{who} ended with {_said(child)}, and nobody has told how.")
    if outcome is AttemptOutcome.FAILED:
        # What failed is never 0, though a script caught its exception, nor a code with a meaning of ours.
        code = ExitCode.FAILED if child == 0 or own in _RESERVED else own
        return Ending(code, f"{who} has failed: {' '.join(known.detail.split()) or _said(child)}.")
    code = ExitCode.FAILED if own in _RESERVED else own
    return Ending(code, f"{who} has finished, and its command ended with {_said(child)} afterwards.")


def _said(child: int) -> str:
    return f"signal {-child}" if child < 0 else f"status {child}"
