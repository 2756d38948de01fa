"""`require(scope)`: the dependency that every route but the open ones declares.

    @router.get("/v1/…")
    def read(caller: Annotated[Principal, require(Scope.READ)]) -> …

A test walks the routes and fails on one that has no RequireScope among its dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Depends, Request

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import authenticate
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


@dataclass(frozen=True)
class RequireScope:
    """None: any valid token."""

    scope: Scope | None

    def __call__(self, request: Request) -> Principal:
        context: ServiceContext = request.app.state.context
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise ProblemError(
                ProblemCode.UNAUTHENTICATED,
                "This call needs a token. Set HOLDFAST_TOKEN, or send `Authorization: Bearer hold_…`.",
            )
        principal = authenticate(context.database, token.strip())
        if self.scope is not None:
            principal.check_scope(self.scope)
        return principal


def require(scope: Scope | None) -> Any:
    return Depends(RequireScope(scope))
