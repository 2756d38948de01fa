"""The fence: every write of a training job passes it, under the run's lock (protocol rules 1 and 5)."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.fencing import Fence
from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.resolve import attempt_numbered
from holdfast_service.catalog.tables import Attempt, Run
from holdfast_service.catalog.went_back import refuse_if_went_back
from holdfast_service.errors import ProblemError


def pass_fence(session: Session, run_id: str, fence: Fence, epoch: int, *, newest: bool = True) -> tuple[Run, Attempt]:
    """Take the run's row FOR SHARE and let only the newest attempt of this epoch through. Raises `stale_attempt`, and
    `catalog_went_back`.

    SHARE, not KEY SHARE: opening an attempt takes the row FOR UPDATE, and nothing of an older attempt may commit
    after the new one was told where to resume. `newest=False` is for a branch off the line, which can change nothing
    that an attempt was told: any attempt of this epoch passes, and one that is not there is `attempt_not_found`.
    """
    refuse_if_went_back(session)
    run = session.execute(
        select(Run).where(Run.id == run_id).with_for_update(read=True), execution_options={"populate_existing": True}
    ).scalar_one()
    if run.deleted_at is not None:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"This run was deleted by {run.deleted_by}, and takes nothing any more. Stop this job and do not restart "
            "it. If the run is to go on, take it back first: `holdfast trash restore PROJECT/RUN`.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    if fence.epoch != epoch:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"The catalog is at epoch {epoch} and this attempt was opened in epoch {fence.epoch}: the catalog was "
            "restored or cloned since. Launch the job again.",
            epoch=epoch,
        )
    if newest and fence.attempt > run.latest_attempt:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"This run has no attempt {fence.attempt}, only {run.latest_attempt}: the database went back to an older "
            "state since this job opened it. Launch the job again.",
            attempt=fence.attempt,
        )
    if newest and fence.attempt != run.latest_attempt:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"Attempt {fence.attempt} was fenced: attempt {run.latest_attempt} has taken over this run. Stop this "
            "job and do not restart it.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    attempt = attempt_numbered(session, run, fence.attempt)
    if not is_of_launch(attempt, fence):
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"Attempt {fence.attempt} of this run is another launch's: the database went back to an older state since "
            "this job opened its own, and the number was given again. Stop this job and do not restart it.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    return run, attempt


def is_of_launch(attempt: Attempt, fence: Fence) -> bool:
    """Whether it is the attempt that the fence's launch has opened. An older client does not say which launch it is."""
    return fence.launch_id in (None, attempt.launch_id)
