"""The outermost middleware: gives each request its id, logs it when it is done, and turns a bug into a reply.

Pure ASGI, so that bodies stream through untouched. The log has the path and never the query string: that of a signed
URL is a secret.
"""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_service.stores.signed_urls import OBJECTS_PATH
from holdfast_service.web.problem_reply import internal_problem, problem_response

REQUEST_ID_HEADER = "X-Request-Id"
# A caller's own id is kept if it cannot break a log line or a header.
_SANE_ID = re.compile(r"^[A-Za-z0-9._:-]{8,128}\Z")
_QUIET_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

_log = structlog.get_logger("holdfast.requests")


class RequestFrame:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _incoming_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begun = time.monotonic()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (REQUEST_ID_HEADER.lower().encode(), request_id.encode()),
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
    """Signed URLs hold their terms in the path: long, and of use to nobody."""
    path: str = scope["path"]
    return f"{OBJECTS_PATH}/…" if path.startswith(OBJECTS_PATH) else path


def _incoming_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER.lower().encode():
            text: str = value.decode("latin-1")
            return text if _SANE_ID.match(text) else None
    return None
