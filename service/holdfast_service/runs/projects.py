"""Projects, by name, with what they hold; made, and given a quota."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.runs import EditProject, ProjectView
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.errors import refuse_unless_seen
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed
from holdfast_service.runs.views import ensure_project, in_trash, page_of_projects, project_named
from holdfast_service.tallies.sums import bytes_against_quota, stored_bytes, sums_of_projects

_CURSOR = "projects"


def list_projects(
    context: ServiceContext, caller: Principal, *, deleted: bool = False, cursor: str | None, limit: int
) -> Page[ProjectView]:
    """By name, with what they hold. A project's token sees its own only. With `deleted` those in the trash, and no
    others."""
    with context.database.read() as session:
        rows, next_cursor = page_of_projects(session, caller, _CURSOR, cursor, limit, deleted=deleted)
        return Page(items=project_views(session, context, rows), next_cursor=next_cursor)


def show_project(context: ServiceContext, caller: Principal, project: str) -> ProjectView:
    """Raises `forbidden` and `project_not_found`."""
    with context.database.read() as session:
        return project_views(session, context, [project_named(session, caller, project)])[0]


def etag_of(project: Project) -> str:
    """It follows from what an edit can change, and is the same again when that is."""
    return f'"quota-{project.quota_bytes}"'


def project_views(session: Session, context: ServiceContext, projects: Sequence[Project]) -> list[ProjectView]:
    ids = [project.id for project in projects]
    sizes = stored_bytes(session, ids)
    against_quota = bytes_against_quota(session, context, ids)
    committed = sums_of_projects(session, ids)
    living = Run.deleted_at.is_(None)
    counts = select(Run.project_id, func.count()).where(Run.project_id.in_(ids), living).group_by(Run.project_id)
    runs = dict(session.execute(counts).all())
    return [
        ProjectView(
            id=project.id,
            name=project.name,
            created_at=project.created_at,
            quota_bytes=project.quota_bytes,
            quota_used_bytes=against_quota[project.id],
            etag=etag_of(project),
            stored_bytes=sizes[project.id],
            logical_bytes=committed[project.id].logical_bytes,
            deduplicated_bytes=committed[project.id].deduplicated_bytes,
            runs=runs.get(project.id, 0),
            in_trash=in_trash(project),
        )
        for project in projects
    ]


def put_project(
    context: ServiceContext, caller: Principal, name: str, request: EditProject, if_match: str | None
) -> tuple[ProjectView, bool]:
    """Makes a project or changes its quota, only from the one that the caller has seen. Twice the same is fine. Returns
    the project, and whether this call has made it. Raises `forbidden` for another project's token, and for a quota that
    a token of one project would change: it bounds that project. `edit_needs_version` and `edit_conflict` if a quota
    that is there would change."""
    caller.check_project_name(name)
    with context.database.transaction() as session:
        is_new = session.scalar(select(Project.id).where(Project.name == name)) is None
        project = ensure_project(session, name, Actor.person(caller))
        session.refresh(project, with_for_update=True)
        if "quota_bytes" in request.model_fields_set and project.quota_bytes != request.quota_bytes:
            caller.check_every_project()
            if not (is_new and project.quota_bytes is None):
                refuse_unless_seen("the project's quota", etag_of(project), if_match, look="Read the project")
            _set_quota(session, caller, project, request.quota_bytes)
        return project_views(session, context, [project])[0], is_new


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
