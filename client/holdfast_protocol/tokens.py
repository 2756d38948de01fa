"""API tokens: `hold_<id>_<secret>`, kept as a SHA-256, with scopes, a project and an end.

`POST   /v1/tokens`        CreateToken -> TokenCreated
`GET    /v1/tokens`                    -> Page[TokenView]
`DELETE /v1/tokens/{id}`               -> TokenView
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from holdfast_protocol.base import Name, Reply, Request
from holdfast_protocol.states import Scope


class CreateToken(Request):
    name: str = Field(min_length=1, max_length=100)
    project: Name | None = Field(default=None, description="null: every project.")
    scopes: list[Scope] = Field(min_length=1)
    expires_in_seconds: int | None = Field(default=90 * 86400, ge=60)


class TokenView(Reply):
    id: str
    name: str
    project: str | None
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class TokenCreated(TokenView):
    token: str = Field(description="Shown once. The service keeps only its SHA-256.")
