"""Makes a project or changes its quota. Twice the same is fine."""

from __future__ import annotations

from holdfast_protocol.runs import EditProject, ProjectView
from holdfast_service.auth.principal import Principal
from holdfast_service.browse.projects import project_views
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.make_run import ensure_project
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.context import ServiceContext


def put_project(context: ServiceContext, caller: Principal, name: str, request: EditProject) -> ProjectView:
    """Raises `forbidden` for another project's token."""
    caller.check_project_name(name)
    with context.database.transaction() as session:
        project = ensure_project(session, name, Actor.person(caller))
        if project.quota_bytes != request.quota_bytes:
            record_event(
                session,
                Actor.person(caller),
                "project.quota",
                project_id=project.id,
                before={"quota_bytes": project.quota_bytes},
                after={"quota_bytes": request.quota_bytes},
            )
            subject_changed(session, RecordKind.PROJECT, project.id, project.id)
        project.quota_bytes = request.quota_bytes
        session.flush()
        return project_views(session, [project])[0]
