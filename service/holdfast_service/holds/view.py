"""How a hold is shown, and the way from its id to its rows."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from holdfast_protocol.holds import HoldKind, HoldView
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.catalog.resolve import locked_checkpoint
from holdfast_service.catalog.tables import Checkpoint, Project, Run
from holdfast_service.errors import ProblemError


def with_names() -> Select[Hold, Checkpoint, Run, Project]:
    return (
        select(Hold, Checkpoint, Run, Project)
        .join(Checkpoint, Checkpoint.id == Hold.checkpoint_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(Project, Project.id == Run.project_id)
    )


def is_in_force(hold: Hold, now: datetime) -> bool:
    """As `catalog.held.in_force` says of rows. `now` is the database's."""
    return hold.released_at is None and (hold.retain_until is None or hold.retain_until > now)


def hold_view(hold: Hold, checkpoint: Checkpoint, run: Run, project: Project, now: datetime) -> HoldView:
    holds = is_in_force(hold, now)
    return HoldView(
        id=hold.id,
        checkpoint_id=checkpoint.id,
        project=project.name,
        run=run.name,
        step=checkpoint.step,
        attempt=checkpoint.attempt_number,
        kind=HoldKind(hold.kind),
        reason=hold.reason,
        retain_until=hold.retain_until,
        in_force=holds,
        mirror=hold.mirror,
        mirrored_at=hold.mirrored_at if holds else None,
        mirror_error=hold.mirror_error if holds else None,
        placed_at=hold.placed_at,
        placed_by=hold.placed_by,
        released_at=hold.released_at,
        released_by=hold.released_by,
        release_reason=hold.release_reason,
    )


def locked_hold(session: Session, caller: Principal, hold_id: str) -> tuple[Hold, Checkpoint, Run, Project]:
    """The hold under its checkpoint's lock, as it is now. Raises `hold_not_found`, also for another project's."""
    row = session.execute(with_names().where(Hold.id == hold_id)).one_or_none()
    if row is None or not caller.sees_project(row.Project.id):
        raise ProblemError(
            ProblemCode.HOLD_NOT_FOUND,
            f"There is no hold {hold_id[:60]!r}. Correct the id; `holdfast hold list` shows them.",
        )
    # Whoever takes a checkpoint away holds the same lock, and asks for holds behind it.
    locked_checkpoint(session, row.Checkpoint.id)
    hold = session.execute(
        select(Hold).where(Hold.id == hold_id), execution_options={"populate_existing": True}
    ).scalar_one()
    return hold, row.Checkpoint, row.Run, row.Project
