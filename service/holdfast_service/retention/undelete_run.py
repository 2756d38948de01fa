"""A deleted run, or project, is taken back: with what went to the trash with it, and is not being purged yet."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.deletion import TakenBack
from holdfast_protocol.states import CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import project_named, refuse_if_deleted, run_named
from holdfast_service.catalog.tables import Checkpoint, Project, Run
from holdfast_service.context import ServiceContext
from holdfast_service.retention.trash import lock_run
from holdfast_service.retention.undelete import out_of_trash

_GOING = (CheckpointState.DELETING, CheckpointState.DELETED)


def undelete_run(context: ServiceContext, caller: Principal, project: str, run: str) -> TakenBack:
    """What was in the trash before the run was deleted stays there. Of a run that is not deleted nothing changes.
    Raises `project_not_found` also where the project is deleted, and `run_not_found` once the run is purged."""
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, project, run, deleted=True)
        # Whoever deletes the project waits until this run lives again, and then is refused; or was first.
        session.refresh(owner, with_for_update={"read": True})
        refuse_if_deleted(owner)
        if lock_run(session, found.id).purged_at is not None:
            refuse_if_deleted(owner, found)
        theirs = (Checkpoint.run_id == found.id, Checkpoint.trashed_by == "run")
        trashed = session.scalars(
            select(Checkpoint)
            .where(*theirs, Checkpoint.state == CheckpointState.TRASHED)
            .order_by(Checkpoint.id)
            .with_for_update(),
            execution_options={"populate_existing": True},
        ).all()
        purged = session.scalar(select(func.count()).where(*theirs, Checkpoint.state.in_(_GOING))) or 0
        for checkpoint in trashed:
            out_of_trash(checkpoint)
            _tell(session, caller, found, "checkpoint.undelete", checkpoint_id=checkpoint.id)
        if found.deleted_at is not None:
            _unmark(found)
            _tell(session, caller, found, "run.undelete", after={"checkpoints": len(trashed), "purged": purged})
            subject_changed(session, RecordKind.RUN, found.id, found.project_id)
    return TakenBack(project=project, run=run, checkpoints=len(trashed), purged=purged)


def undelete_project(context: ServiceContext, caller: Principal, name: str) -> TakenBack:
    """Its runs are taken back one by one. Raises `forbidden` for a token of one project, and `project_not_found` once
    it is purged."""
    caller.check_every_project()
    with context.database.transaction() as session:
        project = project_named(session, caller, name, deleted=True)
        session.refresh(project, with_for_update=True)
        if project.purged_at is not None:
            refuse_if_deleted(project)
        if project.deleted_at is not None:
            _unmark(project)
            record_event(session, Actor.person(caller), "project.undelete", project_id=project.id)
            subject_changed(session, RecordKind.PROJECT, project.id, project.id)
    return TakenBack(project=name, checkpoints=0, purged=0)


def _unmark(found: Project | Run) -> None:
    found.deleted_at = found.deleted_by = found.delete_reason = found.purge_at = None


def _tell(
    session: Session,
    caller: Principal,
    run: Run,
    action: str,
    *,
    checkpoint_id: str | None = None,
    after: dict[str, int] | None = None,
) -> None:
    record_event(
        session,
        Actor.person(caller),
        action,
        project_id=run.project_id,
        run_id=run.id,
        checkpoint_id=checkpoint_id,
        after=after,
    )
