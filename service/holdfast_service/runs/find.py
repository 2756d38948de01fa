"""From names to rows, and rows for names that are not there yet. Every look-up takes the caller."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from sqlalchemy import exists, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Attempt, Checkpoint, Copy, Project, Run
from holdfast_service.errors import ProblemError
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed

# From names to rows. Every look-up takes the caller: what a token may not see does not exist for it.


def project_named(session: Session, caller: Principal, name: str, *, deleted: bool = False) -> Project:
    """With `deleted` one that is in the trash and not purged will do. Raises `forbidden` for another project's token,
    and `project_not_found`."""
    caller.check_project_name(name)
    project = session.scalar(select(Project).where(Project.name == name))
    if project is None:
        raise ProblemError(
            ProblemCode.PROJECT_NOT_FOUND,
            f"There is no project {name!r}. Correct the name, or make it with `holdfast projects create {name}`.",
            project=name,
        )
    if not deleted or project.purged_at is not None:
        refuse_if_deleted(project)
    return project


def run_named(
    session: Session, caller: Principal, project: str, run: str, *, deleted: bool = False
) -> tuple[Project, Run]:
    """With `deleted` one that is in the trash will do. Raises `forbidden`, `project_not_found` and `run_not_found`."""
    owner = project_named(session, caller, project, deleted=deleted)
    found = session.scalar(select(Run).where(Run.project_id == owner.id, Run.name == run))
    if found is None:
        raise ProblemError(
            ProblemCode.RUN_NOT_FOUND,
            f"There is no run {project}/{run}. Correct the name; `holdfast runs list {project}` lists them.",
            project=project,
            run=run,
        )
    if not deleted or found.purged_at is not None:
        refuse_if_deleted(owner, found)
    return owner, found


def refuse_if_deleted(project: Project, run: Run | None = None) -> None:
    """What is in the trash is in no list and takes no job, and its name is not free before it is purged: a job that
    comes back must not begin from nothing beside what can still be taken back. Raises `project_not_found` and
    `run_not_found`."""
    if project.deleted_at is not None:
        raise ProblemError(ProblemCode.PROJECT_NOT_FOUND, _deleted(project, project.name), project=project.name)
    if run is not None and run.deleted_at is not None:
        name = f"{project.name}/{run.name}"
        raise ProblemError(ProblemCode.RUN_NOT_FOUND, _deleted(run, name), project=project.name, run=run.name)


def _deleted(found: Project | Run, name: str) -> str:
    why = f" ({found.delete_reason})" if found.delete_reason else ""
    if found.purged_at is not None:
        return (
            f"{name} was deleted by {found.deleted_by}{why}, and is purged. Its name is free once that is told in "
            "every store that has a record of it: in a moment, or when one that does not answer, or was taken out of "
            "the settings, is back. Try again then, or take another name."
        )
    back = f"`holdfast runs undelete {name}`" if isinstance(found, Run) else f"`holdfast projects undelete {name}`"
    until = "" if found.purge_at is None else f" before {found.purge_at:%Y-%m-%d %H:%M} UTC"
    return (
        f"{name} was deleted by {found.deleted_by}{why}. To go on with it, take it back{until}: "
        f"{back}. To begin anew, take another name; this one is free once the purge is over."
    )


def attempt_numbered(session: Session, run: Run, number: int) -> Attempt:
    """Raises `attempt_not_found`."""
    attempt = session.scalar(select(Attempt).where(Attempt.run_id == run.id, Attempt.number == number))
    if attempt is None:
        raise ProblemError(
            ProblemCode.ATTEMPT_NOT_FOUND,
            f"The run {run.name!r} has no attempt {number}; its newest is {run.latest_attempt}. Correct the number; "
            "`holdfast attempts list` lists them.",
            attempt=number,
            latest_attempt=run.latest_attempt,
        )
    return attempt


def checkpoint_by_id(session: Session, caller: Principal, checkpoint_id: str) -> tuple[Project, Run, Checkpoint]:
    """Raises `checkpoint_not_found`, also for one of a project that the caller may not see: no existence oracle."""
    row = session.execute(
        select(Project, Run, Checkpoint)
        .join(Run, Run.project_id == Project.id)
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .where(Checkpoint.id == checkpoint_id)
    ).one_or_none()
    if row is None or not caller.sees_project(row[0].id):
        raise ProblemError(
            ProblemCode.CHECKPOINT_NOT_FOUND, f"There is no checkpoint {checkpoint_id}.", checkpoint_id=checkpoint_id
        )
    return row[0], row[1], row[2]


def locked_checkpoint(session: Session, checkpoint_id: str) -> Checkpoint:
    """FOR UPDATE, as it is under the lock: whatever was read before may be over."""
    return session.execute(
        select(Checkpoint).where(Checkpoint.id == checkpoint_id).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()


def page_of_projects(
    session: Session, caller: Principal, kind: str, cursor: str | None, limit: int, *, deleted: bool | None = False
) -> tuple[Sequence[Project], str | None]:
    """By name, those that the caller may see, and the cursor of the next page. With `deleted` those in the trash, and
    no others; None: all that there are bytes of, or may be. Raises `invalid_request`."""
    query = select(Project).order_by(Project.name).limit(limit + 1)
    if deleted is None:
        stored = exists().where(Copy.project_id == Project.id, Copy.state != CopyState.GONE)
        query = query.where(or_(Project.purged_at.is_(None), stored))
    else:
        query = query.where(Project.purged_at.is_(None))
        query = query.where(Project.deleted_at.is_not(None) if deleted else Project.deleted_at.is_(None))
    if caller.project_id is not None:
        query = query.where(Project.id == caller.project_id)
    if cursor is not None:
        (name,) = decode_cursor(kind, cursor, str)
        query = query.where(Project.name > name)
    return cut_page(kind, session.scalars(query).all(), limit, lambda project: (project.name,))


# Makes projects and runs where they are not there yet; the same again gives the row that is there.
#
# Only who made it is written down as its maker: of two at once, one. What is in the trash is refused by its name.


def ensure_project(session: Session, name: str, actor: Actor) -> Project:
    project_id = uuid.uuid4().hex
    row = {"id": project_id, "name": name, "quota_bytes": None, "created_at": database_now(session)}
    insert_absent(session, Project, [row])
    project = session.execute(select(Project).where(Project.name == name)).scalar_one()
    refuse_if_deleted(project)
    if project.id == project_id:
        record_event(session, actor, "project.create", project_id=project_id, after={"name": name})
        subject_changed(session, RecordKind.PROJECT, project_id, project_id)
    return project


def ensure_run(session: Session, project: Project, name: str, actor: Actor) -> Run:
    run_id = uuid.uuid4().hex
    row = {
        "id": run_id,
        "project_id": project.id,
        "name": name,
        "latest_attempt": 0,
        "created_at": database_now(session),
    }
    insert_absent(session, Run, [row])
    run = session.execute(select(Run).where(Run.project_id == project.id, Run.name == name)).scalar_one()
    # The insert has waited for whoever deletes the project, whose rows are read anew.
    session.refresh(project)
    refuse_if_deleted(project, run)
    if run.id == run_id:
        record_event(session, actor, "run.create", project_id=project.id, run_id=run_id, after={"name": name})
        subject_changed(session, RecordKind.RUN, run_id, project.id)
    return run
