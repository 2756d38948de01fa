"""A person deletes a project that has no runs any more that are not deleted (protocol rule 46).

Runs go one by one before it, each with what it refuses for: so a project of a thousand runs is no transaction of
minutes, and a deletion that dies half way is gone on with by saying it again.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.deletion import DeleteAll, Deletion
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import FreedBytes
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.in_trash import in_trash
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import project_named
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.retention.delete_run import check_seen, mark_deleted
from holdfast_service.retention.trash import Trashing

_SHOWN = 20


def delete_project(
    context: ServiceContext, caller: Principal, name: str, request: DeleteAll, if_match: str | None
) -> Deletion:
    """Twice is fine. Raises `checkpoint_protected` while it has a run that is not deleted, `edit_needs_version` and
    `edit_conflict`, `forbidden` for a token of one project, and `project_not_found`."""
    caller.check_every_project()
    block = context.database.read if request.dry_run else context.database.transaction
    with block() as session:
        project = project_named(session, caller, name, deleted=True)
        if not request.dry_run:
            # Whoever makes a run in it waits, and sees afterwards that it is deleted.
            session.refresh(project, with_for_update=True)
        etag = f'"project-{project.id}"'
        if project.deleted_at is None:
            _refuse_if_in_use(session, project)
            if not request.dry_run:
                check_seen(etag, if_match)
                _delete(session, project, Trashing.with_its_run(context, Actor.person(caller), request.reason))
        told = in_trash(project)
    return Deletion(
        project=name,
        dry_run=request.dry_run,
        etag=etag,
        checkpoints=0,
        logical_bytes=0,
        freed=FreedBytes(bytes=0),
        in_trash=told,
    )


def _refuse_if_in_use(session: Session, project: Project) -> None:
    living = (Run.project_id == project.id, Run.deleted_at.is_(None))
    names = session.scalars(select(Run.name).where(*living).order_by(Run.name).limit(_SHOWN)).all()
    if not names:
        return
    count = session.scalar(select(func.count()).where(*living)) or 0
    more = f" and {count - len(names)} more" if count > len(names) else ""
    raise ProblemError(
        ProblemCode.CHECKPOINT_PROTECTED,
        f"{project.name} has runs: {', '.join(names)}{more}. Delete them first; `holdfast delete {project.name}` does "
        "both, run by run.",
        runs=list(names),
        count=count,
    )


def _delete(session: Session, project: Project, trashing: Trashing) -> None:
    mark_deleted(session, project, trashing)
    record_event(
        session,
        trashing.actor,
        "project.delete",
        project_id=project.id,
        reason=trashing.reason or None,
        after={"purge_at": None if project.purge_at is None else project.purge_at.isoformat()},
    )
    subject_changed(session, RecordKind.PROJECT, project.id, project.id)
