"""Revokes a token: the next call with it is refused. Twice is fine, and the first moment stays."""

from __future__ import annotations

from sqlalchemy import select

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.tokens import TokenView
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.token_view import token_facts, token_view
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.tables import Project, Token
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def revoke_token(context: ServiceContext, caller: Principal, token_id: str) -> TokenView:
    """Raises `token_not_found`, also for one that the caller may not know of."""
    with context.database.transaction() as session:
        row = session.execute(
            select(Token, Project.name)
            .outerjoin(Project, Project.id == Token.project_id)
            .where(Token.id == token_id)
            .with_for_update(of=Token)
        ).one_or_none()
        if row is None or (caller.project_id is not None and row[0].project_id != caller.project_id):
            raise ProblemError(
                ProblemCode.TOKEN_NOT_FOUND,
                f"There is no token {token_id[:40]!r}. Correct the id; `holdfast token list` shows them.",
            )
        token, project_name = row
        if token.revoked_at is None:
            token.revoked_at = database_now(session)
            record_event(
                session, Actor.person(caller), "token.revoke", project_id=token.project_id, before=token_facts(token)
            )
        return token_view(token, project_name)
