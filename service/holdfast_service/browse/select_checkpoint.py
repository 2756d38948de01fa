"""One checkpoint of a run, by what people write: `latest`, `1200`, `1200#3`, `best:loss`, `ck_…`.

This looks; restoring asks for the restore point instead. So a step is shown whatever has become of it, while `latest`
and `best` mean what a restore would take.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.selectors import AtStep, Best, Latest, Point
from holdfast_protocol.states import CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.points import point_of
from holdfast_service.catalog.proven import unproven_among
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.restore_choice import choose_restore_point, line_of_run
from holdfast_service.catalog.stored_bytes import stored_bytes_of_checkpoint
from holdfast_service.catalog.tables import Checkpoint, Run
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

_LIVE = (CheckpointState.COMMITTED, CheckpointState.UPLOADING)


def select_checkpoint(
    context: ServiceContext, caller: Principal, project: str, run: str, selector: str
) -> CheckpointView:
    """Raises `forbidden`, `project_not_found`, `run_not_found`, `checkpoint_not_found` and `no_restore_point`."""
    point = point_of(selector)
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        if isinstance(point, Latest | Best):
            checkpoint = _restorable(session, found, point)
        elif isinstance(point, AtStep):
            checkpoint = _at_step(session, found, point)
        else:
            checkpoint = _or_not_found(session.get(Checkpoint, point.checkpoint_id), found, point)
        view = current_checkpoint_view(session, owner.name, found.name, checkpoint)
        told = {
            "stored_bytes": stored_bytes_of_checkpoint(session, checkpoint.id),
            "unproven": checkpoint.committed_at is not None and bool(unproven_among(session, [checkpoint.id])),
        }
        return view.model_copy(update=told)


def _restorable(session: Session, run: Run, point: Latest | Best) -> Checkpoint:
    decision = choose_restore_point(session, run.id, point)
    if decision.restore_point is None:
        raise ProblemError(
            ProblemCode.NO_RESTORE_POINT,
            f"No checkpoint of this run can be restored as {point}. `holdfast checkpoints` shows them and why not.",
            selector=str(point),
            ever_committed=decision.ever_committed,
            passed_over=[one.model_dump(mode="json") for one in decision.passed_over],
        )
    return session.get_one(Checkpoint, decision.restore_point.checkpoint_id)


def _at_step(session: Session, run: Run, point: AtStep) -> Checkpoint:
    query = select(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step == point.step)
    if point.attempt is not None:
        query = query.where(Checkpoint.attempt_number == point.attempt)
    line = line_of_run(session, run.id)
    best = max(
        session.scalars(query),
        # The one on the line, else one that lives, else the one that was begun last.
        key=lambda row: (
            row.state in _LIVE and (row.attempt_number, row.step) in line,
            row.state in _LIVE,
            row.created_at,
            row.id,
        ),
        default=None,
    )
    return _or_not_found(best, run, point)


def _or_not_found(checkpoint: Checkpoint | None, run: Run, point: Point) -> Checkpoint:
    if checkpoint is None or checkpoint.run_id != run.id:
        raise ProblemError(
            ProblemCode.CHECKPOINT_NOT_FOUND,
            f"This run has no checkpoint {point}. `holdfast checkpoints` lists those that it has.",
            selector=str(point),
        )
    return checkpoint
