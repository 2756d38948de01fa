"""The routes of `sign_in.py`. They are open: who calls is what they find out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio
from anyio.lowlevel import RunVar
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from holdfast_protocol.service import BeginSignIn, FinishSignIn, SessionView, SignInBegun, SignInProviders
from holdfast_service.auth.principal import FailedCalls, address_of
from holdfast_service.context import Context
from holdfast_service.errors import ProblemError
from holdfast_service.identity.sign_in import (
    begin,
    identify,
    list_providers,
    needs,
    open_session_of,
    set_sign_in_cookie,
)
from holdfast_service.web.admission import Permit, on_a_thread
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.openapi import OPEN
from holdfast_service.web.problem_reply import problem_response

router = APIRouter(route_class=GuardedRoute, tags=["sessions"])

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST_CALLS_OF_PROVIDERS = 8
_THREADS: RunVar[anyio.CapacityLimiter] = RunVar("holdfast_threads_of_sign_ins")


async def _calling_the_provider(work: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
    """On few threads of its own: a provider that does not answer keeps no thread from the calls of jobs."""
    threads = _THREADS.get(None)
    if threads is None:
        threads = anyio.CapacityLimiter(_MOST_CALLS_OF_PROVIDERS)
        _THREADS.set(threads)
    return await anyio.to_thread.run_sync(functools.partial(work, *args, **named), limiter=threads)


@router.get(
    "/v1/sign-ins/providers", openapi_extra=OPEN, name="list_providers", summary="List where people can sign in"
)
def providers(context: Context) -> SignInProviders:
    return list_providers(context)


@router.post(
    "/v1/sign-ins",
    status_code=201,
    openapi_extra=OPEN,
    name="begin_sign_in",
    summary="Begin to sign in at a provider: get the address where the browser goes, and a cookie for this browser",
)
async def begin_one(body: BeginSignIn, context: Context, request: Request, response: Response) -> SignInBegun:
    permit: Permit = request.state.permit
    fetch = await on_a_thread(needs, context, body.provider)  # it may read the file
    if fetch is not None:
        permit.give_back()
        await asyncio.shield(asyncio.wrap_future(fetch))
        await permit.take()
    return await on_a_thread(begin, context, body, request, response)


@router.post(
    "/v1/sign-ins/finish",
    status_code=201,
    openapi_extra=OPEN,
    response_model=SessionView,
    name="finish_sign_in",
    summary="Sign in with what the provider gave this browser: open a session, and get its cookie",
)
async def finish(body: FinishSignIn, context: Context, request: Request, response: Response) -> SessionView | Response:
    """The cookie of the sign-in is good for this call alone, however it ends."""
    failed_calls: FailedCalls = request.app.state.failed_calls
    permit: Permit = request.state.permit
    try:
        with failed_calls.counted(address_of(request), f"sign-in {body.state}", ahead=True):
            permit.give_back()
            who = await _calling_the_provider(identify, context, body, request)
            await permit.take()
            view = await on_a_thread(open_session_of, context, who, request, response)
    except ProblemError as error:
        refusal: JSONResponse = problem_response(error, request.state.request_id)
        set_sign_in_cookie(request, refusal, "", 0)
        return refusal
    set_sign_in_cookie(request, response, "", 0)
    return view
