"""The way of every call with a token: first who calls, then how much may be read, then what it says (rule
limits-before-work).

FastAPI reads and parses a body before it asks any dependency, on the event loop: six strangers with 30 MB each held a
service for a minute. A GuardedRoute authenticates from the headers alone, before the first byte of the body is asked
for, and gives FastAPI a body that is read within the limits of its model and validated already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from holdfast_protocol.base import Request
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.authenticate import RequireScope
from holdfast_service.errors import ProblemError

# A body has half a minute, and a second more for each so many bytes that have come.
BODY_SECONDS = 30.0
_SLOWEST_BYTES_PER_SECOND = 64 * 1024
# What one parse costs goes by the values, which are fewer than the commas: a seal of the most chunks has 200,000.
_MOST_COMMAS = 250_000
_MOST_FAULTS = 1000
# Below this a hop to a thread costs more than the parsing.
_PARSED_AT_ONCE_BYTES = 64 * 1024


class GuardedRoute(APIRoute):
    """For `APIRouter(route_class=…)`. A route's one body is its parameter `body`."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        required = next(_required(self.dependant), None)
        body = None if self.body_field is None else _Body.of(self)

        async def guarded(request: HttpRequest) -> Response:
            if required is not None:
                request.state.caller = await run_in_threadpool(required.caller_of, request)
            return await handle(request if body is None else await body.read(request))

        return guarded


def _required(dependant: Dependant) -> Iterator[RequireScope]:
    if isinstance(dependant.call, RequireScope):
        yield dependant.call
    for inner in dependant.dependencies:
        yield from _required(inner)


class _ReadRequest(HttpRequest):
    """A request whose body is here and validated. FastAPI takes an instance of the model for what it is."""

    def __init__(self, request: HttpRequest, said: object) -> None:
        super().__init__(request.scope, request.receive)
        self._said = said

    async def body(self) -> bytes:
        return b"{}"  # not empty: FastAPI asks for json() then

    async def json(self) -> Any:
        return self._said


@dataclass(frozen=True)
class _Body:
    model: TypeAdapter[Any]
    most_bytes: int

    @classmethod
    def of(cls, route: APIRoute) -> _Body:
        annotation = get_type_hints(route.endpoint, include_extras=True)["body"]
        return cls(TypeAdapter(annotation), max(model.largest_body_bytes for model in _models(annotation)))

    async def read(self, request: HttpRequest) -> _ReadRequest:
        """Raises RequestValidationError, `body_too_large` and `body_too_slow`."""
        body = await self._receive(request)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise _invalid("the body must be JSON, with Content-Type: application/json")
        if len(body) <= _PARSED_AT_ONCE_BYTES:
            return _ReadRequest(request, self._parse(body))
        return _ReadRequest(request, await run_in_threadpool(self._parse, body))

    async def _receive(self, request: HttpRequest) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.most_bytes:
            raise self._too_large()
        body = bytearray()
        begun = asyncio.get_running_loop().time()
        try:
            while True:
                async with asyncio.timeout_at(begun + BODY_SECONDS + len(body) / _SLOWEST_BYTES_PER_SECOND):
                    message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > self.most_bytes:  # sent in pieces, without a length
                    raise self._too_large()
                if not message.get("more_body", False):
                    return bytes(body)
        except TimeoutError:
            raise ProblemError(
                ProblemCode.BODY_TOO_SLOW,
                f"Only {len(body)} bytes of the body came in time. Send it again, on a faster or less busy network.",
            ) from None

    def _parse(self, body: bytes) -> Any:
        if body.count(b",") > _MOST_COMMAS:
            raise _invalid("the body holds more values than any call has")
        try:
            # Strict: what is a number is no text, no truth value and no fraction where an integer is meant.
            return self.model.validate_json(body, strict=True)
        except ValidationError as error:
            if error.error_count() > _MOST_FAULTS:
                raise _invalid(f"{error.error_count()} values of the body are wrong") from None
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None

    def _too_large(self) -> ProblemError:
        return ProblemError(
            ProblemCode.BODY_TOO_LARGE,
            f"The body has more than the {self.most_bytes} bytes that this call may have. Send less at once; a "
            "checkpoint has fewer chunks if the state is cut into larger ones.",
        )


def _models(annotation: Any) -> Iterator[type[Request]]:
    """The models of a body's annotation: one, or those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Request):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _invalid(message: str) -> RequestValidationError:
    return RequestValidationError([{"type": "invalid", "loc": ("body",), "msg": message}])
