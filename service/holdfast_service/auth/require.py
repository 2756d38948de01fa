"""`require(scope)`: the dependency that every route but the open ones declares.

    router = APIRouter(route_class=GuardedRoute)

    @router.get("/v1/…")
    def read(caller: Annotated[Principal, require(Scope.READ)]) -> …

The route itself asks for the caller before it reads the body (`web/guarded_route.py`); the dependency hands the caller
on, and no route has one that did not ask. A test walks the routes and fails on one without a RequireScope.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Depends, Request

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import authenticate
from holdfast_service.auth.failed_calls import FailedCalls
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


@dataclass(frozen=True)
class RequireScope:
    """None: any valid token. `from_memory`: while the database is away, who was let in before is let in again."""

    scope: Scope | None
    from_memory: bool = False

    async def __call__(self, request: Request) -> Principal:
        caller: Principal = request.state.caller
        return caller

    def caller_of(self, request: Request) -> Principal:
        """From the request's head alone; asks the database. Raises `unauthenticated`, `forbidden` and
        `too_many_failures`."""
        context: ServiceContext = request.app.state.context
        failed_calls: FailedCalls = request.app.state.failed_calls
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        token = text.strip()
        if kind.lower() != "bearer" or not token:
            raise ProblemError(
                ProblemCode.UNAUTHENTICATED,
                "This call needs a token. Set HOLDFAST_TOKEN, or send `Authorization: Bearer hold_…`.",
            )
        address = "" if request.client is None else request.client.host
        try:
            principal = failed_calls.authenticated(address, token, partial(authenticate, context.database))
        except ProblemError as error:
            known = failed_calls.last_known(token) if self.from_memory else None
            if known is None or error.code is not ProblemCode.DATABASE_UNAVAILABLE:
                raise
            principal = known
        if self.scope is not None:
            principal.check_scope(self.scope)
        return principal


def require(scope: Scope | None, *, from_memory: bool = False) -> Any:
    return Depends(RequireScope(scope, from_memory))
