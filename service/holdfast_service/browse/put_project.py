"""Makes a project or changes its quota, only from the one that the caller has seen. Twice the same is fine."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.runs import EditProject, ProjectView
from holdfast_service.auth.principal import Principal
from holdfast_service.browse.projects import etag_of, project_views
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.make_run import ensure_project
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.tables import Project
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def put_project(
    context: ServiceContext, caller: Principal, name: str, request: EditProject, if_match: str | None
) -> ProjectView:
    """Raises `forbidden` for another project's token, and for a quota that a token of one project would change: it
    bounds that project. `edit_needs_version` and `edit_conflict` where a quota that is there would change."""
    caller.check_project_name(name)
    with context.database.transaction() as session:
        is_new = session.scalar(select(Project.id).where(Project.name == name)) is None
        project = ensure_project(session, name, Actor.person(caller))
        session.refresh(project, with_for_update=True)
        if "quota_bytes" in request.model_fields_set and project.quota_bytes != request.quota_bytes:
            caller.check_every_project()
            if not (is_new and project.quota_bytes is None):
                _check_version(project, if_match)
            _set_quota(session, caller, project, request.quota_bytes)
        return project_views(session, [project])[0]


def _set_quota(session: Session, caller: Principal, project: Project, quota_bytes: int | None) -> None:
    record_event(
        session,
        Actor.person(caller),
        "project.quota",
        project_id=project.id,
        before={"quota_bytes": project.quota_bytes},
        after={"quota_bytes": quota_bytes},
    )
    subject_changed(session, RecordKind.PROJECT, project.id, project.id)
    project.quota_bytes = quota_bytes
    session.flush()


def _check_version(project: Project, if_match: str | None) -> None:
    if if_match is None:
        raise ProblemError(
            ProblemCode.EDIT_NEEDS_VERSION,
            "To change a quota, say which one was seen. Read the project, and send its `etag` as the header If-Match.",
            etag=etag_of(project),
        )
    if if_match not in (etag_of(project), "*"):
        raise ProblemError(
            ProblemCode.EDIT_CONFLICT,
            "The project was changed since it was read. Read it again and decide anew.",
            etag=etag_of(project),
        )
