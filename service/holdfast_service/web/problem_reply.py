"""From an exception to problem+json (RFC 9457). The only place where an error becomes a reply.

What the caller can act upon is a ProblemError; a store's errors and FastAPI's own are translated here. Anything else is
a bug: it is logged whole under the request's id, and the reply tells nothing but that id.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_protocol.problems import PROBLEM_KINDS, Problem, ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import StoreError
from holdfast_service.stores.problems import store_problem

CLIENT_HAS_GONE = 499
"""The status of a call whose client did not wait for it: for the log and the metrics alone."""

PROBLEM_MEDIA_TYPE = "application/problem+json"
_TYPE_PREFIX = "https://holdfast.dev/problems/"
_RETRY_AFTER_SECONDS = 1
_SHOWN_ERRORS = 10
_STORE_REMEDIES = {
    ProblemCode.STORE_UNAVAILABLE: "Try again.",
    ProblemCode.STORE_FULL: "Free space in the store, or raise its quota.",
    ProblemCode.STORE_REFUSED: "Check the service's credentials for the store, and HOLDFAST_STORE.",
    ProblemCode.CHUNK_GONE: "Take another restore point.",
    ProblemCode.CHECKSUM_MISMATCH: "Send the bytes that were announced.",
}

_log = structlog.get_logger("holdfast.problems")


def install_problem_replies(app: FastAPI) -> None:
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    # It hung up while its body was on the way: no bug, and nobody is there to be answered.
    app.add_exception_handler(ClientDisconnect, lambda request, error: Response(status_code=CLIENT_HAS_GONE))


def problem_response(error: ProblemError, request_id: str, *, status: int | None = None) -> JSONResponse:
    """`status` only if the framework's own says more than the code's."""
    kind = PROBLEM_KINDS[error.code]
    status = status or kind.status
    problem = Problem(
        type=_TYPE_PREFIX + error.code.value,
        title=kind.title,
        status=status,
        code=error.code.value,
        detail=error.detail,
        retryable=kind.retryable,
        request_id=request_id,
        context=error.context,
    )
    headers = {PROTOCOL_HEADER: PROTOCOL_VERSION}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if kind.retryable:
        headers["Retry-After"] = str(error.context.get("retry_after_seconds", _RETRY_AFTER_SECONDS))
    return JSONResponse(
        problem.model_dump(mode="json"), status_code=status, headers=headers, media_type=PROBLEM_MEDIA_TYPE
    )


def internal_problem() -> ProblemError:
    return ProblemError(
        ProblemCode.INTERNAL,
        "The service met a bug. Report it with the request id; the service's log has the details under it.",
    )


def _request_id(request: Request) -> str:
    return str(request.state.request_id)


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    return problem_response(error, _request_id(request))


async def _on_store_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StoreError)
    problem = store_problem(error)
    if problem.status >= 500:
        _log.warning("store_error", error=type(error).__name__, code=problem.code.value, detail=str(error))
    # A store says what is wrong; what to do about it depends on the reader, and here that is a client.
    detail = f"{problem.detail[:1].upper()}{problem.detail[1:].rstrip('.')}. {_STORE_REMEDIES.get(problem.code, '')}"
    return problem_response(ProblemError(problem.code, detail.strip(), **problem.context), _request_id(request))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Without the input: it may hold a secret, and NaN, which is not JSON.
    facts: list[dict[str, Any]] = [
        {"where": [str(part) for part in one["loc"]], "message": one["msg"]} for one in error.errors()
    ]
    first = facts[0]
    detail = f"{'.'.join(first['where'])}: {first['message']}. Correct the request."
    return problem_response(
        ProblemError(ProblemCode.INVALID_REQUEST, detail, errors=facts[:_SHOWN_ERRORS]), _request_id(request)
    )


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: an unknown route, a method that a route does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        problem = ProblemError(
            ProblemCode.ROUTE_NOT_FOUND,
            f"There is no route {request.url.path}. Correct the path; /openapi.json lists them.",
            path=request.url.path,
        )
    elif error.status_code == 405:
        allowed = _methods_of(request)
        problem = ProblemError(
            ProblemCode.METHOD_NOT_ALLOWED,
            f"{request.method} is not possible on {request.url.path}, but {', '.join(allowed)}. Correct the method.",
            path=request.url.path,
            methods=allowed,
        )
        # The framework names those of the first route of this path alone.
        error.headers = {"Allow": ", ".join(allowed)}
    else:
        problem = ProblemError(ProblemCode.INVALID_REQUEST, f"The request cannot be read: {error.detail}. Correct it.")
    response = problem_response(problem, _request_id(request), status=error.status_code)
    response.headers.update(error.headers or {})
    return response


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    return compile_path(path)[0]


def _methods_of(request: Request) -> list[str]:
    """Every method that the request's path has, of whichever route. Of a path that routes have word for word, theirs
    alone: it names no token, run or project of another route."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    routes = [each for each in iter_route_contexts(request.app.routes) if _pattern(each.path or "").match(path)]
    word_for_word = [each for each in routes if each.path == path]
    return sorted({method for each in word_for_word or routes for method in each.methods or ()})
