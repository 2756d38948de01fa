"""What a rebuild could not know, by project, and the person's word that ends the doubt (rule rebuild-doubts)."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.stores import ConfirmCommits, DoubtView
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context, ServiceContext
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.pages import DEFAULT_PAGE, page_of
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.records import RebuildDoubt
from holdfast_service.lineage.restore_choice import EVERY, why_in_doubt
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Admin, Cursor, Limit, Reader


def put_doubts(session: Session, reasons: Mapping[str, list[str]]) -> None:
    """By the project's name, or EVERY for the projects that were not found: nothing may be said of those. Each known
    project gets a row, even without a doubt: a project that is made later is then known to be new."""
    session.execute(delete(RebuildDoubt))
    known = dict.fromkeys(session.scalars(select(Project.name).order_by(Project.name)))
    if not any(reasons.values()):
        return
    rows = [
        {"project": name, "run": EVERY, "reason": " ".join(reasons.get(name, ())) or None}
        for name in sorted({*known, EVERY})
    ]
    insert_absent(session, RebuildDoubt, rows)


def list_doubts(context: ServiceContext, caller: Principal) -> list[DoubtView]:
    """The doubts that no person has ended, of the projects that the caller sees."""
    with context.database.read() as session:
        rows = session.scalars(
            select(RebuildDoubt).where(RebuildDoubt.reason.is_not(None)).order_by(RebuildDoubt.project)
        )
        return [
            DoubtView(project=row.project or None, reason=row.reason)
            for row in rows
            if caller.project_name in (None, row.project)
        ]


def confirm(context: ServiceContext, caller: Principal, request: ConfirmCommits) -> DoubtView:
    """From now on the service says of this run, or of every run of the project, what its catalog says. Repeatable.
    Raises `forbidden` for a token of another project."""
    caller.check_project_name(request.project)
    run = request.run or EVERY
    with context.database.transaction() as session:
        why = why_in_doubt(session, request.project, run)
        if why is not None:
            session.execute(
                delete(RebuildDoubt).where(RebuildDoubt.project == request.project, RebuildDoubt.run == run)
            )
            insert_absent(session, RebuildDoubt, [{"project": request.project, "run": run, "reason": None}])
            record_event(
                session,
                Actor.person(caller),
                "catalog.confirm",
                project_id=session.scalar(select(Project.id).where(Project.name == request.project)),
                reason=request.reason,
                before={"project": request.project, "run": request.run, "doubt": why},
            )
    return DoubtView(project=request.project, run=request.run, reason=None)


router = APIRouter(route_class=GuardedRoute, tags=["catalog"])


@router.get("/v1/catalog/doubts", name="list_doubts", summary="List what a rebuild of the catalog could not know")
def doubts(context: Context, caller: Reader, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE) -> Page[DoubtView]:
    return page_of("doubts", list_doubts(context, caller), lambda each: each.project or "", cursor=cursor, limit=limit)


@router.post(
    "/v1/catalog/confirmations",
    status_code=201,
    name="confirm",
    summary="Confirm that a rebuilt catalog lacks no commit of a run, or of a project",
)
def confirm_commits(body: ConfirmCommits, context: Context, caller: Admin) -> DoubtView:
    return confirm(context, caller, body)
