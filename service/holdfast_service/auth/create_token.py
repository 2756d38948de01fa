"""Makes a token. A project's administrator can make them for that project only, and nobody more than they have."""

from __future__ import annotations

from datetime import timedelta

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.tokens import CreateToken, TokenCreated
from holdfast_service.auth.make_token import insert_token, new_token_text
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.token_view import token_facts, token_view
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.resolve import project_named
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def create_token(context: ServiceContext, caller: Principal, request: CreateToken) -> TokenCreated:
    """Raises `forbidden` for what the caller does not have, and `project_not_found`."""
    for scope in request.scopes:
        caller.check_scope(scope)
    if request.project is None and caller.project_name is not None:
        raise ProblemError(
            ProblemCode.FORBIDDEN,
            f"The token {caller.name!r} belongs to the project {caller.project_name!r} and cannot make one for every "
            "project. Name the project.",
        )
    text = new_token_text()
    with context.database.transaction() as session:
        project = project_named(session, caller, request.project) if request.project is not None else None
        expires_at = None
        if request.expires_in_seconds is not None:
            expires_at = database_now(session) + timedelta(seconds=request.expires_in_seconds)
        token = insert_token(
            session,
            text,
            name=request.name,
            scopes=request.scopes,
            project_id=project.id if project else None,
            expires_at=expires_at,
            created_by_token=caller.token_id,
        )
        record_event(
            session, Actor.person(caller), "token.create", project_id=token.project_id, after=token_facts(token)
        )
        view = token_view(token, request.project)
    return TokenCreated(**view.model_dump(), token=text)
