"""The frame around each request, and the way of every call with a token.

Around each: the host, the metrics, the id and the access log, the protocol's version; its connection is that of
`connections.py`. A call with a token then passes `GuardedRoute`: first who calls, then how much may be read, then what
it says.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args, get_type_hints

import structlog
from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION, Request, speaks_with
from holdfast_protocol.problems import Problem, ProblemCode
from holdfast_service.auth.principal import RequireScope, last_known
from holdfast_service.context import WAITS_FOR_STORE
from holdfast_service.errors import ProblemError
from holdfast_service.stores.posix.signed_urls import OBJECTS_PATH
from holdfast_service.web.admission import Admission, Permit, class_of, on_a_thread
from holdfast_service.web.connections import CONNECTION, STREAMS
from holdfast_service.web.fair_queue import CallClass
from holdfast_service.web.held_refusals import HeldRefusals
from holdfast_service.web.problem_reply import (
    CLIENT_HAS_GONE,
    PROBLEM_MEDIA_TYPE,
    internal_problem,
    problem_response,
)

_SHOWN_HOST_CHARACTERS = 100


class HostCheck:
    """Refuses a Host that is not this service's name (rule limits-before-work). `names`: lower-case, `*.example.org`
    for all below one.

    A web page whose name its owner has pointed at this machine's loopback could otherwise read the open routes through
    the browser of a person here (DNS rebinding). An address is always good: no page can choose one, and load balancers
    and scrapers call by address.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or _is_address(name := _without_port(host)) or self._allows(name):
            await self._app(scope, receive, send)
            return
        await problem_response(_refusal(name), scope["state"]["request_id"])(scope, receive, send)

    def _allows(self, name: str) -> bool:
        return any(fnmatchcase(name, allowed) for allowed in self._names)


def _without_port(host: str) -> str:
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(name: str) -> ProblemError:
    shown = name[:_SHOWN_HOST_CHARACTERS]
    return ProblemError(
        ProblemCode.HOST_NOT_ALLOWED,
        f"This service does not go by the name {shown!r}. Call it by its address or by a name that "
        "HOLDFAST_ALLOWED_HOSTS lists.",
        host=shown,
    )


_SHOWN_CHARACTERS = 20


class ProtocolHeader:
    """Both sides tell their protocol's version; what does not fit is refused with both numbers (rule protocol-version).
    A caller that says nothing (curl, a browser, a store's ticket) is served."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[PROTOCOL_HEADER] = PROTOCOL_VERSION
            await send(message)

        theirs = Headers(scope=scope).get(PROTOCOL_HEADER)
        if theirs is not None and not speaks_with(theirs):
            refusal = problem_response(_unsupported(theirs), scope["state"]["request_id"])
            await refusal(scope, receive, send_with_version)
            return
        await self._app(scope, receive, send_with_version)


def _unsupported(theirs: str) -> ProblemError:
    shown = theirs[:_SHOWN_CHARACTERS]
    return ProblemError(
        ProblemCode.UNSUPPORTED_PROTOCOL,
        f"The client speaks protocol {shown} and this service {PROTOCOL_VERSION}. Install a client of the same major "
        "version as the service.",
        client=shown,
        service=PROTOCOL_VERSION,
    )


# A commit with many ranks takes tens of milliseconds, a long poll up to a minute.
_BUCKETS_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


# What a client may call its method is up to the client, and each would be a time series of its own too.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


SHARED_COUNTERS = "PROMETHEUS_MULTIPROC_DIR"
"""The library's variable: set before it is imported, metrics are counted in files of that folder."""


def registry_of_requests(shown: CollectorRegistry) -> CollectorRegistry:
    """For the RequestMeter, so that `shown` has its figures. Several processes that serve one port count into files of
    one folder, and each shows what all of them counted."""
    if SHARED_COUNTERS not in os.environ:
        return shown
    MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
    return CollectorRegistry()


class RequestMeter:
    """Counts requests by route and status, and their time. Pure ASGI; by the route's template, never by the path: a
    path holds ids, and each would be a time series of its own."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "holdfast_requests", "Requests, by route and status.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "holdfast_request_seconds",
            "Time from the request's first byte to the reply's last.",
            ("method", "route"),
            buckets=_BUCKETS_SECONDS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # what the frame answers, should nothing be sent from inside

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun = time.monotonic()
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(method, route, str(status)).inc()
            if STREAMS not in scope:  # how long one looks on says nothing of the service
                self._seconds.labels(method, route).observe(time.monotonic() - begun)


REQUEST_ID_HEADER = "X-Request-Id"
# A caller's own id is kept if it cannot break a log line or a header.
_SANE_ID = re.compile(r"^[A-Za-z0-9._:-]{8,128}\Z")
_QUIET_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_LONGEST_SHOWN_PATH = 500

_log = structlog.get_logger("holdfast.requests")


# A chunk, an error or a text that a job gave is no page: a browser that opens one runs nothing in it. A cache must not
# keep the reply to a call by cookie.
_UNLESS_SET = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"cache-control", b"no-store"),
)


_CLOSES = ((b"connection", b"close"),)
_FIRST_ERROR = 400


class RequestFrame:
    """The outermost middleware: gives each request its id, logs it when it is done, and turns a bug into a reply. Each
    reply says what a browser may do with it (rule page-from-here); a route that says it itself is left alone.

    Pure ASGI: bodies stream through untouched. The log has the path and never the query string: that of a signed URL is
    a secret.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _incoming_id(scope) or uuid.uuid4().hex
        scope["headers"] = [(name, _plain(value) if name == b"cookie" else value) for name, value in scope["headers"]]
        scope.setdefault("state", {})["request_id"] = request_id
        begun = time.monotonic()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = message.get("headers", [])
                names = {name for name, _ in given}
                connection = scope.get(CONNECTION)
                if connection is not None and status < _FIRST_ERROR:
                    connection.was_served()
                message["headers"] = [
                    *given,
                    *(_CLOSES if connection is not None and connection.ends_with_reply else ()),
                    *scope["state"].get("rate_limit", ()),  # of the caller's token or project: web/fair_queue.py
                    (REQUEST_ID_HEADER.lower().encode(), request_id.encode()),
                    *(header for header in _UNLESS_SET if header[0] not in names),
                ]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                _log.exception("bug", method=scope["method"], path=scope["path"])
                if status is not None:
                    raise  # half a reply is out: only a broken connection can still say that it is not whole
                await problem_response(internal_problem(), request_id)(scope, receive, send_with_id)
            finally:
                self._log_access(scope, status, time.monotonic() - begun)

    @staticmethod
    def _log_access(scope: Scope, status: int | None, seconds: float) -> None:
        log = _log.debug if scope["path"] in _QUIET_PATHS and status == 200 else _log.info
        caller = scope["state"].get("caller")
        log(
            "request",
            method=scope["method"],
            path=_shown_path(scope),
            status=status,
            seconds=round(seconds, 4),
            client=None if scope.get("client") is None else scope["client"][0],
            token=None if caller is None else caller.token_id,
        )


def _shown_path(scope: Scope) -> str:
    """Signed URLs hold their terms in the path: long, and of no use in a log. So is what a stranger makes up."""
    path: str = scope["path"]
    if path.startswith(OBJECTS_PATH):
        return f"{OBJECTS_PATH}/…"
    return path if len(path) <= _LONGEST_SHOWN_PATH else f"{path[:_LONGEST_SHOWN_PATH]}…"


def _incoming_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER.lower().encode():
            text: str = value.decode("latin-1")
            return text if _SANE_ID.match(text) else None
    return None


def _plain(cookies: bytes) -> bytes:
    """Without those that have an escape: no cookie of ours has one. FastAPI has each cookie unquoted by Python, on the
    event loop and at each route, which takes seconds for a long one before 3.11.10 and 3.12.6 (CVE-2024-7592)."""
    return b";".join(cookie for cookie in cookies.split(b";") if b"\\" not in cookie)


# A body has half a minute, and a second more for each so many bytes that have come.
BODY_SECONDS = 30.0
_SLOWEST_BYTES_PER_SECOND = 64 * 1024
# What one parse costs goes by the values, which are fewer than the commas: a seal of the most chunks has 200,000.
_MOST_COMMAS = 250_000
_MOST_FAULTS = 1000
# Below this a hop to a thread costs more than the parsing.
_PARSED_AT_ONCE_BYTES = 64 * 1024


_PROBLEM_REPLIES: dict[int | str, dict[str, Any]] = {
    status: {"description": told, "content": {PROBLEM_MEDIA_TYPE: {}}, "model": Problem}
    for status, told in (
        ("4XX", "What the caller must fix; `code` says what."),
        ("5XX", "Try again if `retryable`."),
    )
}


class DocumentedRoute(APIRoute):
    """For `APIRouter(route_class=…)`: what the OpenAPI document says of every route. It is not said by a router
    that includes the others: FastAPI would work out each route a second time, at the first call of each process."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        more["responses"] = _PROBLEM_REPLIES | (more.get("responses") or {})
        more["generate_unique_id_function"] = operation_id
        super().__init__(path, endpoint, **more)


class GuardedRoute(DocumentedRoute):
    """For `APIRouter(route_class=…)`. A route's one body is its parameter `body`. It first lets the call in, or refuses
    it for load (`web/admission.py`), then authenticates the caller, then limits how much may be read, then reads what
    the call says (rule limits-before-work).

    FastAPI reads and parses a body before it asks any dependency, on the event loop: six strangers with 30 MB each held
    a service for a minute. A GuardedRoute authenticates from the headers alone, before the first byte of the body is
    asked for, and gives FastAPI a body that is read within the limits of its model and validated already.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        super().__init__(path, _on_a_thread(endpoint), **more)

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        required = next(required_by(self.dependant), None)
        body = None if self.body_field is None else _Body.of(self)
        kind = class_of(self.methods or (), self.path)
        if required is None:
            return handle if body is None else _from_strangers(handle, kind, body)

        async def guarded(request: HttpRequest) -> Response:
            try:
                return await within_limits(request)
            except ProblemError as error:
                held: HeldRefusals = request.app.state.held_refusals
                await held.wait(request, error)
                raise

        async def within_limits(request: HttpRequest) -> Response:
            admission: Admission = request.app.state.admission
            caller = required.admitted(request)
            known = caller or last_known(request)
            if known is not None:
                request.state.owner = admission.project_of(known, request.path_params)
            with admission.call(request, kind, known) as permit:
                request.state.permit = permit
                WAITS_FOR_STORE.set(permit.waits_for_store)  # of this request's task, and of its threads
                if caller is None:
                    await permit.take()
                    caller = await on_a_thread(required.caller_of, request)
                    permit.authenticated(caller, request.path_params)
                request.state.caller = caller
                if body is not None:
                    permit.give_back()  # none is held while a body comes
                    request = await body.read(request, permit)
                await permit.take()
                if permit.waited_seconds and await request.is_disconnected():
                    return Response(status_code=CLIENT_HAS_GONE)
                return await handle(request)

        return guarded


def _from_strangers(
    handle: Callable[[HttpRequest], Coroutine[Any, Any, Response]], kind: CallClass, body: _Body
) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
    """Of an open route that reads a body: within the same limits, in the turns of those whose token was not seen."""

    async def guarded(request: HttpRequest) -> Response:
        admission: Admission = request.app.state.admission
        received = await body.receive(request)  # bodies that do not come would use up the places of all newcomers
        with admission.call(request, kind, None) as permit:
            request.state.permit = permit
            request = await body.read(request, permit, received)
            if permit.waited_seconds and await request.is_disconnected():
                return Response(status_code=CLIENT_HAS_GONE)
            return await handle(request)

    return guarded


def _on_a_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """FastAPI validates the result of a sync endpoint on a second thread, and each hop costs a small call some percent
    of its time. An async endpoint has one hop: to the thread that works."""
    if asyncio.iscoroutinefunction(endpoint):
        return endpoint

    @functools.wraps(endpoint)
    async def works(**arguments: Any) -> Any:
        return await on_a_thread(endpoint, **arguments)

    return works


def required_by(dependant: Dependant) -> Iterator[RequireScope]:
    """What a route's parameters say of its caller: one, or none for a route that is open."""
    if isinstance(dependant.call, RequireScope):
        yield dependant.call
    for inner in dependant.dependencies:
        yield from required_by(inner)


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

    async def read(self, request: HttpRequest, permit: Permit, received: bytes | None = None) -> _ReadRequest:
        """Takes the permit once the body is here. `received`: it is here already. Raises RequestValidationError,
        `body_too_large` and `body_too_slow`."""
        body = await self.receive(request) if received is None else received
        await permit.take()
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise _invalid("the body must be JSON, with Content-Type: application/json")
        if len(body) <= _PARSED_AT_ONCE_BYTES:
            return _ReadRequest(request, self._parse(body))
        return _ReadRequest(request, await on_a_thread(self._parse, body))

    async def receive(self, request: HttpRequest) -> bytes:
        """Raises `body_too_large` and `body_too_slow`."""
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


def operation_id(route: APIRoute) -> str:
    """`tokens_create`: the route's tag and its name. Generated clients have it as a function's name, so it never
    changes; a test says that each is unique."""
    return f"{route.tags[0]}_{route.name.rstrip('_')}"
