"""How a token is shown: never its secret, nor the secret's hash."""

from __future__ import annotations

from typing import Any

from holdfast_protocol.states import Scope
from holdfast_protocol.tokens import TokenView
from holdfast_service.catalog.tables import Token


def token_view(token: Token, project_name: str | None) -> TokenView:
    return TokenView(
        id=token.id,
        name=token.name,
        project=project_name,
        scopes=[Scope(scope) for scope in token.scopes],
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
    )


def token_facts(token: Token) -> dict[str, Any]:
    """What an audit event says of it."""
    return {
        "token": token.id,
        "name": token.name,
        "scopes": list(token.scopes),
        "expires_at": None if token.expires_at is None else token.expires_at.isoformat(),
    }
