"""The route for those who have no token of this service yet. Who they are stands in the body, so the route is open."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from holdfast_protocol.service import ExchangedToken, ExchangeToken
from holdfast_service.auth.principal import FailedCalls, address_of
from holdfast_service.context import Context
from holdfast_service.identity.exchange import exchange_token, identities_in
from holdfast_service.web.admission import Permit, on_a_thread
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.openapi import OPEN

router = APIRouter(route_class=GuardedRoute, tags=["tokens"])


@router.post(
    "/v1/tokens/exchange",
    openapi_extra=OPEN,
    summary="Get a short-lived token for the token of a job or of a person that another issuer vouches for; its text "
    "is shown once",
)
async def exchange(body: ExchangeToken, context: Context, request: Request) -> ExchangedToken:
    failed_calls: FailedCalls = request.app.state.failed_calls
    permit: Permit = request.state.permit
    identities, address = identities_in(context), address_of(request)
    proven = failed_calls.must_wait(address, body.subject_token) > 0 and await on_a_thread(
        identities.is_proven, body.subject_token
    )
    with failed_calls.counted(address, body.subject_token, proven=proven):
        fetch = await on_a_thread(identities.needs, body.subject_token)  # it may read the file
        if fetch is not None:
            permit.give_back()  # a provider that does not answer keeps no other call from its turn
            await asyncio.shield(asyncio.wrap_future(fetch))
            await permit.take()
        made = await on_a_thread(exchange_token, context, body, count=permit.count_exchange)
        failed_calls.made(made.access_token)
        return made
