"""The tokens that the caller may know of: all of them, or its project's."""

from __future__ import annotations

from sqlalchemy import select, tuple_

from holdfast_protocol.base import Page
from holdfast_protocol.tokens import TokenView
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.token_view import token_view
from holdfast_service.catalog.cursors import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.catalog.tables import Project, Token
from holdfast_service.context import ServiceContext

_CURSOR = "tokens"


def list_tokens(context: ServiceContext, caller: Principal, *, cursor: str | None, limit: int) -> Page[TokenView]:
    query = (
        select(Token, Project.name)
        .outerjoin(Project, Project.id == Token.project_id)
        .order_by(Token.created_at.desc(), Token.id.desc())
        .limit(limit + 1)
    )
    if caller.project_id is not None:
        query = query.where(Token.project_id == caller.project_id)
    if cursor is not None:
        created_at, token_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(Token.created_at, Token.id) < (moment_from_text(created_at), token_id))
    with context.database.read() as session:
        rows = session.execute(query).all()
    shown, next_cursor = cut_page(_CURSOR, rows, limit, lambda row: (moment_to_text(row[0].created_at), row[0].id))
    return Page(items=[token_view(token, project_name) for token, project_name in shown], next_cursor=next_cursor)
