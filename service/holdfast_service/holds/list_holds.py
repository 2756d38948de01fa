"""The holds that the caller may know of, the newest first."""

from __future__ import annotations

from sqlalchemy import tuple_

from holdfast_protocol.base import Page
from holdfast_protocol.holds import HoldView
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.cursors import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.catalog.held import in_force
from holdfast_service.catalog.resolve import checkpoint_by_id, project_named, run_named
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.holds.view import hold_view, with_names

_CURSOR = "holds"


def list_holds(
    context: ServiceContext,
    caller: Principal,
    *,
    project: str | None = None,
    run: str | None = None,
    checkpoint_id: str | None = None,
    over: bool,
    cursor: str | None,
    limit: int,
) -> Page[HoldView]:
    """`over`: also those that are released or have ended. One may be what keeps a deleted run from its
    purge. Raises what the names raise."""
    if run is not None and project is None:
        raise ProblemError(ProblemCode.INVALID_REQUEST, "A run is named with its project. Give `project` as well.")
    query = with_names().order_by(Hold.placed_at.desc(), Hold.id.desc()).limit(limit + 1)
    if cursor is not None:
        placed_at, hold_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(Hold.placed_at, Hold.id) < tuple_(moment_from_text(placed_at), hold_id))
    with context.database.read() as session:
        if checkpoint_id is not None:
            checkpoint_by_id(session, caller, checkpoint_id)
            query = query.where(Hold.checkpoint_id == checkpoint_id)
        if project is not None and run is not None:
            query = query.where(Run.id == run_named(session, caller, project, run, deleted=True)[1].id)
        elif project is not None:
            query = query.where(Project.id == project_named(session, caller, project, deleted=True).id)
        if caller.project_id is not None:
            query = query.where(Project.id == caller.project_id)
        now = database_now(session)
        if not over:
            query = query.where(in_force(now))
        rows, next_cursor = cut_page(
            _CURSOR, session.execute(query).all(), limit, lambda row: (moment_to_text(row[0].placed_at), row[0].id)
        )
    return Page(items=[hold_view(*row, now) for row in rows], next_cursor=next_cursor)
