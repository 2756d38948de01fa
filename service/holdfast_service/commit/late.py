"""Late saves: where a save that an attempt kept in its spool belongs once it is pushed (protocol rule 4).

It belongs to the attempt that staged it, and is written by the one that pushes it. On the line it is as if it had been
committed in time; that is allowed only while the run has not gone on without it. Afterwards it is a branch off the
line: kept, and never `latest`.

Two that act at once: whoever opens an attempt holds the run's row alone, and aborts what is being pushed on the line.
The newest attempt's own first begin needs no such order: a late save that has not seen it is one that came before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import BeginCheckpoint
from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.fencing import pass_fence
from holdfast_service.catalog.resolve import attempt_numbered
from holdfast_service.catalog.tables import Attempt, Checkpoint, Run
from holdfast_service.errors import ProblemError


@dataclass(frozen=True)
class LateSave:
    """`off_line` says why it cannot be on the line of descent any more; None: it can."""

    run: Run
    origin: Attempt
    pusher: Attempt
    off_line: str | None


def place_late_save(session: Session, run_id: str, request: BeginCheckpoint, epoch: int) -> LateSave:
    """Raises `stale_attempt`, `attempt_not_found`, and `invalid_request` for a save of an attempt yet to come."""
    # Who accepts a branch needs no fence against newer attempts: a branch changes nothing that they were told.
    run, pusher = pass_fence(session, run_id, request, epoch, newest=not request.allow_off_line)
    assert request.origin_attempt is not None
    origin = attempt_numbered(session, run, request.origin_attempt)
    if origin.number > pusher.number:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"Attempt {pusher.number} cannot push a save of attempt {origin.number}, which is newer. Push it as the "
            f"newest attempt, {run.latest_attempt}.",
            origin_attempt=origin.number,
            latest_attempt=run.latest_attempt,
        )
    return LateSave(run, origin, pusher, _why_off_line(session, run, origin, pusher))


def refuse_off_line(late: LateSave, request: BeginCheckpoint) -> None:
    """Raises `off_line_branch` unless the caller accepts one."""
    if late.off_line is None or request.allow_off_line:
        return
    raise ProblemError(
        ProblemCode.OFF_LINE_BRANCH,
        f"Step {request.step} of attempt {late.origin.number} comes too late: {late.off_line}. It can be kept beside "
        "the line and restored by its name (allow_off_line), but never be the latest.",
        origin_attempt=late.origin.number,
        step=request.step,
    )


def _why_off_line(session: Session, run: Run, origin: Attempt, pusher: Attempt) -> str | None:
    if pusher.number != run.latest_attempt:
        return f"attempt {run.latest_attempt} has taken over this run"
    if origin.number == pusher.number:
        return None
    went_on = session.scalar(
        select(func.min(Attempt.number)).where(
            Attempt.run_id == run.id, Attempt.number > origin.number, Attempt.cut_at.is_not(None)
        )
    )
    if went_on is not None:
        return f"attempt {went_on} has made the run go on from elsewhere"
    begun = exists().where(Checkpoint.run_id == run.id, Checkpoint.attempt_number == pusher.number)
    if session.scalar(select(begun)):
        return f"attempt {pusher.number} has begun to save steps of its own"
    return None
