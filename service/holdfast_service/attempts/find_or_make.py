"""The run that an attempt is opened in: found, or made where that is what the caller wants.

A mistyped name must not quietly train from scratch (protocol rule 20): unless `create` says so, a new name that looks
like that of a run with checkpoints is refused.
"""

from __future__ import annotations

from sqlalchemy import and_, exists, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.attempts.similar_names import similar_names
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.make_run import ensure_project, ensure_run
from holdfast_service.catalog.resolve import project_named, refuse_if_deleted, run_named
from holdfast_service.catalog.tables import Checkpoint, Project, Run
from holdfast_service.errors import ProblemError

_SUGGESTIONS = 3


def find_or_make_run(session: Session, caller: Principal, project_name: str, run_name: str, create: bool | None) -> Run:
    """Raises `forbidden`, `project_not_found` and `run_not_found` ("did you mean")."""
    caller.check_project_name(project_name)
    project = session.scalar(select(Project).where(Project.name == project_name))
    run = None if project is None else _run_of(session, project, run_name)
    if project is not None:
        refuse_if_deleted(project, run)
    if run is not None:
        return run
    if create is None:
        _refuse_mistyped(session, caller, project_name, run_name)
    if project is None:
        project = _make_project(session, caller, project_name, create)
    if create is False:
        return run_named(session, caller, project_name, run_name)[1]
    return ensure_run(session, project, run_name, Actor.person(caller))


def _run_of(session: Session, project: Project, run_name: str) -> Run | None:
    return session.scalar(select(Run).where(Run.project_id == project.id, Run.name == run_name))


def _make_project(session: Session, caller: Principal, name: str, create: bool | None) -> Project:
    """Only for tokens that may make projects; for any other the name is wrong."""
    if create is not False and caller.project_id is None and Scope.ADMIN in caller.scopes:
        return ensure_project(session, name, Actor.person(caller))
    return project_named(session, caller, name)


def _refuse_mistyped(session: Session, caller: Principal, project_name: str, run_name: str) -> None:
    committed = exists().where(Checkpoint.run_id == Run.id, Checkpoint.committed_at.is_not(None))
    living = and_(Run.deleted_at.is_(None), Project.deleted_at.is_(None))
    rows = session.execute(
        select(Project.id, Project.name, Run.name).join(Run, Run.project_id == Project.id).where(committed, living)
    )
    known = (f"{project}/{run}" for project_id, project, run in rows if caller.sees_project(project_id))
    name = f"{project_name}/{run_name}"
    meant = similar_names(name, known)[:_SUGGESTIONS]
    if meant:
        raise ProblemError(
            ProblemCode.RUN_NOT_FOUND,
            f"There is no run {name}. Did you mean {' or '.join(meant)}, which has checkpoints? Correct the name, or "
            "say that the run is new (create=True).",
            project=project_name,
            run=run_name,
            did_you_mean=meant,
        )
