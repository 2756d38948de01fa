"""Routes of tokens and sessions. The text of a token or a code is in one reply only, that of its making."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from holdfast_protocol.base import Page
from holdfast_protocol.service import (
    CreateToken,
    OpenSession,
    RotateToken,
    SessionView,
    SignInCode,
    TokenCreated,
    TokenRotated,
    TokenView,
)
from holdfast_service.auth.sessions import (
    end_session,
    list_sessions,
    make_sign_in_code,
    open_session,
    revoke_session,
    show_session,
)
from holdfast_service.auth.tokens import create_token, list_tokens, revoke_own_token, revoke_token, rotate_token
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Admin, AnyCaller, Cursor, IdempotencyKey, Limit, SigningIn

router = APIRouter(route_class=GuardedRoute, tags=["tokens"])


@router.post("/v1/tokens", status_code=201, summary="Make a token; its text is shown once")
def create(body: CreateToken, context: Context, caller: Admin, idempotency_key: IdempotencyKey = None) -> TokenCreated:
    return create_token(context, caller, body, idempotency_key)


@router.get("/v1/tokens", name="list", summary="List tokens, the newest first, revoked ones too")
def list_all(
    context: Context,
    caller: Admin,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[TokenView]:
    return list_tokens(context, caller, cursor=cursor, limit=limit)


@router.delete("/v1/tokens/current", name="revoke_own", summary="Sign out a command: revoke the token of this call")
def revoke_current(context: Context, caller: AnyCaller) -> TokenView:
    return revoke_own_token(context, caller)


@router.delete("/v1/tokens/{token_id}", summary="Revoke a token, at once and for good")
def revoke(token_id: str, context: Context, caller: Admin) -> TokenView:
    return revoke_token(context, caller, token_id)


@router.post(
    "/v1/tokens/{token_id}/rotate",
    status_code=201,
    summary="Replace a token by one like it, and have it end after a while; the text of the new one is shown once",
)
def rotate(
    token_id: str, body: RotateToken, context: Context, caller: Admin, idempotency_key: IdempotencyKey = None
) -> TokenRotated:
    return rotate_token(context, caller, token_id, body, idempotency_key)


sessions_router = APIRouter(route_class=GuardedRoute, tags=["sessions"])


@sessions_router.post(
    "/v1/sessions", status_code=201, name="open", summary="Sign in: open a session of this token, and get its cookie"
)
def open_one(context: Context, caller: SigningIn, request: Request, response: Response) -> SessionView:
    return open_session(context, caller, request, response)


@sessions_router.get(
    "/v1/sessions",
    name="list",
    summary="List open sessions, the newest first: of the caller's token, or with `operate` or `admin` of every token "
    "that it may know of",
)
def list_open(
    context: Context, caller: AnyCaller, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[OpenSession]:
    return list_sessions(context, caller, cursor=cursor, limit=limit)


@sessions_router.get("/v1/sessions/current", summary="The session of this cookie")
def show(context: Context, caller: AnyCaller, request: Request) -> SessionView:
    return show_session(context, caller, request)


@sessions_router.delete("/v1/sessions/current", status_code=204, summary="Sign out: end the session of this cookie")
def end(context: Context, caller: AnyCaller, request: Request, response: Response) -> None:
    end_session(context, caller, request, response)


@sessions_router.delete("/v1/sessions/{session_id}", name="revoke", summary="End a session, at once")
def end_one(session_id: str, context: Context, caller: AnyCaller) -> OpenSession:
    return revoke_session(context, caller, session_id)


@sessions_router.post(
    "/v1/sign-in-codes", status_code=201, summary="Make a code that opens one session within a minute"
)
def make_code(context: Context, caller: AnyCaller) -> SignInCode:
    return make_sign_in_code(context, caller)
