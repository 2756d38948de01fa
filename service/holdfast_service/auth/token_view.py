"""How a token is shown: never its secret, nor the secret's hash."""

from __future__ import annotations

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
