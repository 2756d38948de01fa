"""Projects, by name, with what they hold; made, and given quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.runs import EditProject, ProjectView, QuotaView
from holdfast_protocol.states import QuotaKind
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import QUOTA_COLUMNS, Project
from holdfast_service.errors import ProblemError, refuse_unless_seen
from holdfast_service.quotas.crossings import tell
from holdfast_service.quotas.limits import HARD, SOFT, used_of
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed
from holdfast_service.runs.views import ensure_project, in_trash, page_of_projects, project_named
from holdfast_service.tallies.sums import stored_bytes, sums_of_projects

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
    return f'"quota-{"-".join(str(getattr(project, name)) for name in QUOTA_COLUMNS)}"'


def project_views(session: Session, context: ServiceContext, projects: Sequence[Project]) -> list[ProjectView]:
    ids = [project.id for project in projects]
    sizes = stored_bytes(session, ids)
    committed = sums_of_projects(session, ids)
    used = used_of(session, context, ids, committed)
    return [
        ProjectView(
            id=project.id,
            name=project.name,
            created_at=project.created_at,
            quota_bytes=project.quota_bytes,
            quota_used_bytes=used[project.id][QuotaKind.BYTES],
            quotas=[
                QuotaView(
                    kind=kind,
                    hard=getattr(project, HARD[kind]),
                    soft=getattr(project, SOFT[kind]),
                    used=used[project.id][kind],
                )
                for kind in QuotaKind
            ],
            etag=etag_of(project),
            stored_bytes=sizes[project.id],
            logical_bytes=committed[project.id].logical_bytes,
            deduplicated_bytes=committed[project.id].deduplicated_bytes,
            runs=used[project.id][QuotaKind.RUNS],
            in_trash=in_trash(project),
        )
        for project in projects
    ]


def put_project(
    context: ServiceContext, caller: Principal, name: str, request: EditProject, if_match: str | None
) -> tuple[ProjectView, bool]:
    """Makes a project or changes its quotas, only from those that the caller has seen. Twice the same is fine. Returns
    the project, and whether this call has made it. Raises `forbidden` for another project's token, and for a quota that
    a token of one project would change: it bounds that project. `edit_needs_version` and `edit_conflict` if a quota
    that is there would change, and `invalid_request` for a soft one above the hard one."""
    caller.check_project_name(name)
    with context.database.transaction() as session:
        is_new = session.scalar(select(Project.id).where(Project.name == name)) is None
        project = ensure_project(session, name, Actor.person(caller))
        session.refresh(project, with_for_update=True)
        wanted = {name: getattr(request, name) for name in QUOTA_COLUMNS if name in request.model_fields_set}
        changed = {name: quota for name, quota in wanted.items() if quota != getattr(project, name)}
        if changed:
            caller.check_every_project()
            if not (is_new and all(getattr(project, name) is None for name in QUOTA_COLUMNS)):
                refuse_unless_seen("the project's quota", etag_of(project), if_match, look="Read the project")
            _set_quotas(session, context, caller, project, changed)
        return project_views(session, context, [project])[0], is_new


def _set_quotas(
    session: Session,
    context: ServiceContext,
    caller: Principal,
    project: Project,
    changed: Mapping[str, int | None],
) -> None:
    record_event(
        session,
        Actor.person(caller),
        "project.quota",
        project_id=project.id,
        before={name: getattr(project, name) for name in changed},
        after=dict(changed),
    )
    subject_changed(session, RecordKind.PROJECT, project.id, project.id)
    for name, quota in changed.items():
        setattr(project, name, quota)
    _refuse_soft_above_hard(project)
    session.flush()
    tell(session, context, project.id)


def _refuse_soft_above_hard(project: Project) -> None:
    for kind in QuotaKind:
        hard, soft = getattr(project, HARD[kind]), getattr(project, SOFT[kind])
        if hard is not None and soft is not None and soft > hard:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"The soft quota of {soft} {kind} is above the hard one of {hard}, which comes first. Give "
                "a lower one.",
                kind=kind.value,
            )
