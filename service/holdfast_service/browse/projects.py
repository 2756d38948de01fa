"""Projects, by name, with what they hold. A project's token sees its own only."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.runs import ProjectView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.in_trash import in_trash
from holdfast_service.catalog.resolve import page_of_projects, project_named
from holdfast_service.catalog.stored_bytes import committed_bytes, stored_bytes
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.context import ServiceContext

_CURSOR = "projects"


def list_projects(
    context: ServiceContext, caller: Principal, *, deleted: bool = False, cursor: str | None, limit: int
) -> Page[ProjectView]:
    """With `deleted` those in the trash, and no others."""
    with context.database.read() as session:
        rows, next_cursor = page_of_projects(session, caller, _CURSOR, cursor, limit, deleted=deleted)
        return Page(items=project_views(session, rows), next_cursor=next_cursor)


def show_project(context: ServiceContext, caller: Principal, project: str) -> ProjectView:
    """Raises `forbidden` and `project_not_found`."""
    with context.database.read() as session:
        return project_views(session, [project_named(session, caller, project)])[0]


def etag_of(project: Project) -> str:
    """It follows from what an edit can change, and is the same again when that is."""
    return f'"quota-{project.quota_bytes}"'


def project_views(session: Session, projects: Sequence[Project]) -> list[ProjectView]:
    ids = [project.id for project in projects]
    sizes = stored_bytes(session, ids)
    committed = committed_bytes(session, ids)
    living = Run.deleted_at.is_(None)
    counts = select(Run.project_id, func.count()).where(Run.project_id.in_(ids), living).group_by(Run.project_id)
    runs = dict(session.execute(counts).all())
    return [
        ProjectView(
            id=project.id,
            name=project.name,
            created_at=project.created_at,
            quota_bytes=project.quota_bytes,
            etag=etag_of(project),
            stored_bytes=sizes[project.id],
            logical_bytes=committed[project.id].logical,
            deduplicated_bytes=committed[project.id].deduplicated,
            runs=runs.get(project.id, 0),
            in_trash=in_trash(project),
        )
        for project in projects
    ]
