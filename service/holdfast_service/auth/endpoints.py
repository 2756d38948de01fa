"""Routes of tokens. The text of a token is in one reply only, that of its making."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.service import CreateToken, TokenCreated, TokenView
from holdfast_service.auth.tokens import create_token, list_tokens, revoke_token
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Admin, Cursor, IdempotencyKey, Limit

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


@router.delete("/v1/tokens/{token_id}", summary="Revoke a token, at once and for good")
def revoke(token_id: str, context: Context, caller: Admin) -> TokenView:
    return revoke_token(context, caller, token_id)
