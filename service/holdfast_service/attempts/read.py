"""Reading attempts. For tokens that read and for those that train: a launch asks for the newest attempt's number."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import defer

from holdfast_protocol.attempts import AttemptView
from holdfast_protocol.base import Page
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.cursors import cut_page, decode_cursor
from holdfast_service.catalog.resolve import attempt_numbered, run_named
from holdfast_service.catalog.tables import Attempt
from holdfast_service.catalog.views import attempt_view
from holdfast_service.context import ServiceContext

_CURSOR = "attempts"


def list_attempts(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, *, cursor: str | None, limit: int
) -> Page[AttemptView]:
    """The newest first."""
    _check_scope(caller)
    with context.database.read() as session:
        _, run = run_named(session, caller, project_name, run_name)
        # A page of environments is much, and of use to nobody: who looks at one attempt sees it.
        statement = (
            select(Attempt)
            .options(defer(Attempt.environment))
            .where(Attempt.run_id == run.id)
            .order_by(Attempt.number.desc())
            .limit(limit + 1)
        )
        if cursor is not None:
            statement = statement.where(Attempt.number < decode_cursor(_CURSOR, cursor, int)[0])
        rows, next_cursor = cut_page(_CURSOR, session.scalars(statement).all(), limit, lambda row: (row.number,))
        return Page[AttemptView](items=[attempt_view(row, listed=True) for row in rows], next_cursor=next_cursor)


def read_attempt(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, number: int
) -> AttemptView:
    """Raises `attempt_not_found`."""
    _check_scope(caller)
    with context.database.read() as session:
        _, run = run_named(session, caller, project_name, run_name)
        return attempt_view(attempt_numbered(session, run, number))


def _check_scope(caller: Principal) -> None:
    if Scope.TRAIN not in caller.scopes:
        caller.check_scope(Scope.READ)
