"""From a token's text to the caller. Only the SHA-256 of the secret is kept; comparison takes constant time."""

from __future__ import annotations

import hmac

from sqlalchemy import select

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.auth.make_token import parse_token
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.tables import Project, Token
from holdfast_service.clock import database_now
from holdfast_service.database import Database
from holdfast_service.errors import ProblemError


def authenticate(database: Database, text: str) -> Principal:
    """Raises `unauthenticated`; the sentence does not tell a wrong secret from an unknown id."""
    try:
        token_id, offered = parse_token(text)
    except ValueError:
        raise _refused("is not a Holdfast token; it has the form hold_<id>_<secret>") from None
    with database.read() as session:
        row = session.execute(
            select(Token, Project.name).outerjoin(Project, Project.id == Token.project_id).where(Token.id == token_id)
        ).one_or_none()
        if row is None or not hmac.compare_digest(offered, row[0].secret_sha256):
            raise _refused("is not known")
        token, project_name = row
        if token.revoked_at is not None:
            raise _refused("was revoked")
        if token.expires_at is not None and token.expires_at <= database_now(session):
            raise _refused("has expired")
        return Principal(
            token_id=token.id,
            name=token.name,
            scopes=frozenset(Scope(scope) for scope in token.scopes),
            project_id=token.project_id,
            project_name=project_name,
        )


def _refused(why: str) -> ProblemError:
    return ProblemError(
        ProblemCode.UNAUTHENTICATED,
        f"The token {why}. Set HOLDFAST_TOKEN to a valid one; an administrator makes it with `holdfast token create`.",
    )
